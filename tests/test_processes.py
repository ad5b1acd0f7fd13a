"""Nothing that was started outlives its launcher, however that ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hotprefix.engines import core_shares
from hotprefix.errors import UserError
from hotprefix.guard import shared_memory
from hotprefix.processes import Child, Port, RunFolder, wait_until

STUBBORN = "trap '' TERM; sleep 1000 & echo started; while :; do wait; done"
"""Ignores SIGTERM and has a child."""


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    made = RunFolder()
    yield made
    made.remove()


def start(folder: RunFolder, log: Path, *command: str) -> Child:
    return Child(command, log=log, folder=folder, env=os.environ)


def group_of(pid: int) -> list[int]:
    return [one.pid for one in psutil.process_iter() if _group(one.pid) == pid]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_stop_asks_first_and_reports_the_status(folder: RunFolder, tmp_path: Path) -> None:
    child = start(
        folder, tmp_path / "log", "bash", "-c", "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"
    )
    assert wait_until(lambda: "up" in child.tail(), 10, 0.01)
    assert child.exit_code is None
    child.stop()
    assert child.exit_code == 7
    child.stop()


def test_a_stubborn_command_and_its_children_are_killed(folder: RunFolder, tmp_path: Path) -> None:
    child = start(folder, tmp_path / "log", "bash", "-c", STUBBORN)
    assert child.pid is not None
    assert wait_until(lambda: "started" in child.tail(), 10, 0.01)
    assert len(group_of(child.pid)) == 2
    child.stop(grace_s=0.1)
    assert child.exit_code == 128 + signal.SIGKILL
    assert group_of(child.pid) == []


def test_what_a_command_leaves_behind_is_killed(folder: RunFolder, tmp_path: Path) -> None:
    child = start(folder, tmp_path / "log", "bash", "-c", "sleep 1000 & exit 3")
    assert child.pid is not None
    assert wait_until(lambda: child.exit_code is not None, 10, 0.01)
    assert child.exit_code == 3
    assert group_of(child.pid) == []


def test_a_command_that_cannot_start_says_why(folder: RunFolder, tmp_path: Path) -> None:
    child = start(folder, tmp_path / "log", "/no/such/command")
    assert child.pid is None
    child.stop()
    assert child.exit_code == 127
    assert "cannot start /no/such/command" in child.tail()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_ends_with_its_launcher(how: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, pathlib\n"
        "from hotprefix.processes import Child, RunFolder\n"
        "folder = RunFolder()\n"
        f"child = Child(['bash', '-c', {STUBBORN!r}], log=pathlib.Path({str(tmp_path / 'log')!r}), folder=folder,"
        " env=os.environ)\n"
        "print(child.pid, folder.path, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        said = launcher.stdout.readline().split()
        pid, folder = int(said[0]), Path(said[1])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert group_of(pid)
        launcher.send_signal(how)
    assert wait_until(lambda: not group_of(pid) and not folder.exists(), 20, 0.02)


def test_shared_memory_of_a_killed_command_is_removed(folder: RunFolder, tmp_path: Path) -> None:
    program = (
        "import signal; from multiprocessing.shared_memory import SharedMemory\n"
        "segment = SharedMemory(create=True, size=4096); print(segment.name, flush=True); signal.pause()"
    )
    child = start(folder, tmp_path / "log", sys.executable, "-c", program)
    assert child.pid is not None
    assert wait_until(lambda: child.tail().startswith("psm_"), 10, 0.01)
    path = Path("/dev/shm") / child.tail().strip()
    assert shared_memory(child.pid) == {str(path)}
    child.kill()
    assert not path.exists()


def test_the_log_is_continued_but_the_tail_is_of_this_start(folder: RunFolder, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number, keep in ((1, False), (2, True)):
        child = Child(["echo", f"life {number}"], log=log, folder=folder, env=os.environ, keep_log=keep)
        assert wait_until(lambda child=child: child.exit_code is not None, 10, 0.01)
        assert child.tail() == f"life {number}"
    assert log.read_text() == "life 1\nlife 2\n"


def test_a_held_port_refuses_connections_and_can_be_taken_by_the_server() -> None:
    port = Port()
    with socket.socket() as caller:
        assert caller.connect_ex(("127.0.0.1", port.number)) != 0
    with socket.create_server(("127.0.0.1", port.number)) as server, socket.socket() as caller:
        caller.connect(server.getsockname())
        with pytest.raises(UserError, match=f"cannot use port {port.number}"):
            Port(port.number)
    port.close()


@pytest.mark.parametrize(
    ("engines", "cores", "shares"),
    [
        (2, [0, 1], [(0,), (1,)]),
        (2, [0, 1, 2, 3, 4], [(0, 1), (2, 3)]),
        (3, [4, 6], [(4,), (6,), (4,)]),
        (1, [0, 1], [(0, 1)]),
    ],
)
def test_engines_share_the_cores(engines: int, cores: list[int], shares: list[tuple[int, ...]]) -> None:
    assert core_shares(engines, cores) == shares
