"""``hotprefix up`` as a user runs it: a real process, its printed curl line, Ctrl-C, deaths."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from hotprefix.engine_env import ensure_engine
from hotprefix.errors import NoEngine
from hotprefix.home import find_home
from hotprefix.processes import wait_until
from hotprefix.progress import say_error

READY = "base URL "
ANY_PORT = ("--port", "0", "--admin-port", "0")

pytestmark = pytest.mark.timeout(300)


class Up:
    """A running ``hotprefix up``. Its output goes to files, so that no pipe can fill."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def printed(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_ready(self, timeout_s: float = 200.0) -> None:
        assert wait_until(lambda: READY in self.printed or self.process.poll() is not None, timeout_s), (
            self.said
        )
        assert READY in self.printed, self.said

    def parts(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)


@contextmanager
def up(tmp_path: Path, *flags: str, home: Path | None = None) -> Iterator[Up]:
    """Temporary files, the run folder among them, go to ``tmp_path/t``."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    env = {**os.environ, "HOTPREFIX_HOME": str(home or tmp_path / "home"), "TMPDIR": str(temporary)}
    with (tmp_path / "stdout").open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        command = [sys.executable, "-m", "hotprefix.cli", "up", *flags]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, start_new_session=True)
    try:
        yield Up(process, tmp_path)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def curl(line: str) -> dict[str, object]:
    """Does what the printed curl line does."""
    words = shlex.split(line)
    headers = dict([words[words.index("-H") + 1].split(": ")])
    answer = httpx.post(words[1], headers=headers, content=words[words.index("-d") + 1], timeout=60.0)
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


def listening(processes: list[psutil.Process]) -> set[int]:
    """The ports they listen on. An engine's short-lived children may end meanwhile."""
    ports: set[int] = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found = process.net_connections("tcp")
            ports |= {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
    return ports


def accepts(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0)
    except httpx.HTTPError:
        return False
    return True


def assert_nothing_left(run: Up, parts: list[psutil.Process], ports: set[int]) -> None:
    assert wait_until(lambda: not any(part.is_running() for part in parts), 30)
    assert not any(accepts(port) for port in ports)
    assert wait_until(lambda: not list((run.folder / "t").glob("hp-*")), 10)


@pytest.mark.parametrize(("how", "engines"), [(signal.SIGINT, 2), (signal.SIGTERM, 1), (signal.SIGKILL, 1)])
def test_simulated_engines_serve_and_leave_nothing(how: signal.Signals, engines: int, tmp_path: Path) -> None:
    with up(tmp_path, "--engine", "sim", "--engines", str(engines), *ANY_PORT) as run:
        run.wait_ready()
        line = next(line for line in run.printed.splitlines() if line.strip().startswith("curl"))
        assert "choices" in curl(line)
        parts = run.parts()
        ports = listening(parts)
        assert len(ports) == engines + 2
        assert "node" not in run.said
        assert list((tmp_path / "t").glob("hp-*"))
        run.process.send_signal(how)
        assert run.wait() == (-9 if how == signal.SIGKILL else 0)
        assert_nothing_left(run, parts, ports)


def test_an_engine_that_dies_at_start_is_reported_and_all_is_stopped(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with up(tmp_path, "--engine", "sim", "--model", str(model), *ANY_PORT) as run:
        assert run.wait() == 1
        assert re.search(r"engine-[12] ended with status \d+; its log:\n", run.said)
        assert "tokenizer" in run.said
        assert_nothing_left(run, [], set())


def test_the_others_go_on_without_an_engine_that_dies_later(tmp_path: Path) -> None:
    with up(tmp_path, "--engine", "sim", "--engines", "2", *ANY_PORT) as run:
        run.wait_ready()
        line = next(line for line in run.printed.splitlines() if line.strip().startswith("curl"))
        engines = [
            part for part in run.parts() if "sim" in part.cmdline() and "guard.py" not in str(part.cmdline())
        ]
        engines[0].kill()
        assert wait_until(lambda: "ended with status 137" in run.said, 30)
        assert "choices" in curl(line)
        engines[1].kill()
        assert run.wait() == 1
        assert "no engine is left" in run.said


def test_an_engine_that_dies_is_started_again_where_that_is_asked_for(tmp_path: Path) -> None:
    with up(tmp_path, "--engine", "sim", "--engines", "1", "--restart", *ANY_PORT) as run:
        run.wait_ready()
        ready = time.monotonic()
        line = next(line for line in run.printed.splitlines() if line.strip().startswith("curl"))
        assert wait_until(lambda: time.monotonic() - ready > 6, 10)
        os.kill(int(re.findall(r"engine-1 .*\(process (\d+)\)", run.said)[0]), signal.SIGKILL)
        assert wait_until(lambda: "engine-1 is started again" in run.said, 30)
        assert wait_until(lambda: answered(line), 30)


def answered(line: str) -> bool:
    try:
        return "choices" in curl(line)
    except (AssertionError, httpx.HTTPError):
        return False


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--engines", "0"], "--engines is a number from 1 to 64"),
        (["--block-size", "16"], "multiples of 32"),
        (["--kv-blocks", "100"], "--kv-blocks 100 holds no prompt of --max-model-len, 128 would"),
        (["--node-gib", "0"], "--node-gib is a number from 1 on"),
        (["--policy", "prefx", "--engine", "sim"], "prefix"),
        (["--enginse", "2", "--engine", "sim"], "--enginse"),
        (["--engine", "sim", "--model", "./nowhere"], "there is no model folder ./nowhere"),
    ],
)
def test_mistakes_get_a_line_and_status_2(flags: list[str], line: str, tmp_path: Path) -> None:
    with up(tmp_path, *flags, *ANY_PORT) as run:
        assert run.wait() == 2
        assert line in run.said
        assert "Traceback" not in run.said


def test_a_taken_port_gets_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        with up(tmp_path, "--engine", "sim", "--port", taken, "--admin-port", "0") as run:
            assert run.wait() == 2
            assert f"cannot use port {taken}" in run.said


def _runs(part: psutil.Process, command: str) -> bool:
    """Whether a process is ``hotprefix COMMAND`` itself, not its guard."""
    try:
        words = part.cmdline()
    except psutil.NoSuchProcess:
        return False
    return "guard.py" not in str(words) and words[1:4] == ["-m", "hotprefix.cli", command]


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_real_engines_serve_and_leave_nothing(tmp_path: Path) -> None:
    home = find_home()
    try:
        ensure_engine(home, say_error)
    except NoEngine as reason:
        pytest.skip(f"no engine: {reason}")
    before = set(os.listdir("/dev/shm"))
    with up(tmp_path, "--engines", "1", *ANY_PORT, home=home.root) as run:
        run.wait_ready(800.0)
        line = next(line for line in run.printed.splitlines() if line.strip().startswith("curl"))
        assert json.dumps(curl(line)["usage"])
        parts = run.parts()
        node = next(part for part in parts if _runs(part, "node"))
        assert json.dumps(curl(line)["usage"])
        node.kill()
        assert wait_until(lambda: "node ended with status 137" in run.said, 30)
        assert json.dumps(curl(line)["usage"])
        ports = listening(parts)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0
        assert_nothing_left(run, parts, ports)
    left = {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}
    assert left <= before
