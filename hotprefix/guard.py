"""Stands between a launcher and one command, so that the command never outlives the launcher.

Run as ``python guard.py FOLDER COMMAND…`` with a socket as standard input whose other end only the
launcher holds. The guard says the command's process id there, then takes orders: ``term SECONDS`` and
``kill``. End of input means that the launcher is gone, however it went: the command is ended and FOLDER
removed. The command leads a session of its own; when it ends, all it left behind in its group is killed,
and only then does the guard exit, with the command's status (128 + n after signal n).

vLLM often ends its workers by force and then leaves their shared memory behind, 400 MB an engine. So the
guard remembers what the group had mapped under names that Python's multiprocessing makes up, and removes it.

Imports nothing of hotprefix: it must start fast and stay small.
"""

import contextlib
import ctypes
import glob
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_GRACE_S = 3.0
_GROUP_END_S = 10.0
_LEFT_BEHIND = re.compile(r" (/dev/shm/psm_[^/ ]+)$", re.MULTILINE)


def _prctl() -> Callable[[int, int], object]:
    if not sys.platform.startswith("linux"):
        return lambda _option, _value: None
    libc = ctypes.CDLL(None)
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


class Guard:
    """One command's guard. ``deadline`` is when patience ends and the group is killed."""

    def __init__(self, command: list[str], orders: socket.socket) -> None:
        prctl = _prctl()
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._orders = orders
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._on_signal)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self.orphaned = False
        self._told_to_end = False
        self._deadline: float | None = None
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 (one thread)
        )
        self.status: int | None = None
        self._shared: set[str] = set()
        orders.sendall(f"{self._child.pid}\n".encode())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told_to_end |= number != signal.SIGCHLD

    def run(self) -> int:
        """Waits for the command's end; its status."""
        watched = [self._woken, self._orders]
        while self._reap() is None:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select(watched, [], [], left)
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            if self._orders in ready and not self._obey():
                watched.remove(self._orders)
            if self._told_to_end:
                self._told_to_end = False
                self._end(_ORPHAN_GRACE_S)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._signal_group(signal.SIGKILL)
                self._deadline = time.monotonic() + 1.0
        self._end_group()
        assert self.status is not None
        return self.status

    def _obey(self) -> bool:
        """Carries out what the launcher says; False once it is gone."""
        try:
            orders = self._orders.recv(4096)
        except ConnectionError:
            orders = b""
        if not orders:
            self.orphaned = True
            self._end(_ORPHAN_GRACE_S)
            return False
        for order in orders.decode().splitlines():
            word, _, seconds = order.partition(" ")
            self._end(float(seconds) if word == "term" else 0.0)
        return True

    def _end(self, grace_s: float) -> None:
        self._shared |= shared_memory(self._child.pid)
        if grace_s > 0:
            os.kill(self._child.pid, signal.SIGTERM)  # not yet reaped, so the id is still its own
        self._deadline = time.monotonic() + grace_s

    def _signal_group(self, number: int) -> bool:
        """False when nobody is left in the group."""
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # macOS: only zombies are left
            return False
        return True

    def _reap(self) -> int | None:
        """Collects every child that has ended, adopted ones too; the command's status if known."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._child.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self.status = 128 - code if code < 0 else code
        return self.status

    def _end_group(self) -> None:
        """What the command left behind is killed and removed; returns when it is gone."""
        self._shared |= shared_memory(self._child.pid)
        give_up = time.monotonic() + _GROUP_END_S
        while self._signal_group(signal.SIGKILL) and time.monotonic() < give_up:
            select.select([self._woken], [], [], 0.02)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            self._reap()
        for path in self._shared:
            with contextlib.suppress(OSError):
                os.unlink(path)


def shared_memory(group: int) -> set[str]:
    """Segments of a process group that only its end would orphan. Empty where there is no /proc."""
    found: set[str] = set()
    for entry in glob.iglob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.removeprefix("/proc/"))) == group:
                with open(f"{entry}/maps", encoding="utf-8", errors="replace") as maps:
                    found.update(_LEFT_BEHIND.findall(maps.read()))
    return found


def main() -> int:
    """Guards ``sys.argv[2:]``."""
    orders = socket.socket(fileno=os.dup(0))
    try:
        guard = Guard(sys.argv[2:], orders)
    except OSError as error:
        print(f"cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr)
        return 127
    status = guard.run()
    if guard.orphaned:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
