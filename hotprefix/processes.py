"""Processes that never outlive whoever started them, their ports and their run folder.

Knows nothing of engines or gateways. A :class:`Child` may be started and stopped from any thread.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hotprefix import guard
from hotprefix.errors import UserError

_POLL_S = 0.1


class Port:
    """A loopback TCP port that stays ours from now until ``close``, between restarts too: a socket
    is bound to it and never listens, so connections are refused until the real server is there."""

    def __init__(self, number: int = 0, host: str = "127.0.0.1") -> None:
        self._held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._held.bind((host, number))
        except OSError as error:
            self._held.close()
            raise UserError(f"cannot use port {number} on {host}: {error.strerror}") from error
        self.number: int = self._held.getsockname()[1]

    def close(self) -> None:
        """Gives the port back."""
        self._held.close()


class RunFolder:
    """A private folder (0700) for sockets and generated files, with a short path: the path of a Unix
    socket may not be longer than about 100 bytes."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hp-"))

    def endpoint(self, name: str) -> str:
        """The ZMQ endpoint of a socket in this folder."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Removes it with all it holds; again is a no-op."""
        shutil.rmtree(self.path, ignore_errors=True)


class Child:
    """One command behind its guard (see ``hotprefix.guard``), in a session of its own; standard output
    and error go to ``log``, which is continued when ``keep_log``. If this process ends without
    stopping it, the guard ends it and removes ``folder``. ``cwd`` is where it runs, ours by default."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        folder: RunFolder,
        env: Mapping[str, str],
        keep_log: bool = False,
        cwd: Path | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab" if keep_log else "wb") as output:
            self._log_start = output.tell()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(folder.path), *command],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self._orders = ours
        said = ours.recv(64)
        self.pid: int | None = int(said) if said.strip() else None
        """The command's own process id; None if it could not be started (the log says why)."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + n after signal n."""
        return self._guard.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """To the whole group of the command, for tests that freeze or wake an engine."""
        if self.pid is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def ask_to_stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM now, SIGKILL after ``grace_s``; returns at once."""
        self._order(f"term {grace_s}\n")

    def stop(self, grace_s: float = 10.0) -> None:
        """Ends it and returns when nothing of it is left."""
        self.ask_to_stop(grace_s)
        self._wait()

    def kill(self) -> None:
        """SIGKILL to the whole group; returns when nothing of it is left."""
        self._order("kill\n")
        self._wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines it wrote since this start."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _order(self, order: str) -> None:
        with contextlib.suppress(OSError):
            self._orders.sendall(order.encode())

    def _wait(self) -> None:
        self._guard.wait()
        self._orders.close()


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Looks every ``poll_s`` until ``condition()`` holds; False if it does not within ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(poll_s)
    return True
