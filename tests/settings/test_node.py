"""A node's configuration: its file, variables and flags, and what it refuses. deploy/node.example.yaml is the
reference, so it is held against the schema."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from cachenode.config import Node
from hotprefix import settings
from policies.eviction import EVICTIONS, build

EXAMPLE = Path(__file__).parents[2] / "deploy" / "node.example.yaml"
LINES = re.findall(r"^(?:# )?eviction: (\{.*\})$", EXAMPLE.read_text(), re.MULTILINE)


def test_the_example_says_every_key_and_its_default() -> None:
    config = settings.NODE.load(["--config", str(EXAMPLE)], {}).config
    written, defaults = yaml.safe_load(EXAMPLE.read_text()), msgspec.to_builtins(Node())
    for key in settings.NODE.leaves:
        said, default = written, defaults
        for part in key.split("."):
            assert part in said, f"{key} is missing"
            said, default = said[part], default[part]
        if key != "eviction":
            assert said == default, f"{key} is not its default"
    assert config.eviction["name"] == Node().eviction["name"]


def test_its_eviction_lines_are_the_table_with_every_parameter_at_its_default() -> None:
    specs = [yaml.safe_load(line) for line in LINES]
    assert sorted(spec["name"] for spec in specs) == sorted(EVICTIONS)
    for spec in specs:
        schema, _ = EVICTIONS[spec["name"]]
        assert {**msgspec.to_builtins(schema()), "name": spec["name"]} == spec
        build(spec, 1000)


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("name: of-file\nmemory: {bytes: 2000000}\n")
    variables = {
        "HOTPREFIX_NODE_NAME": "of-variable",
        "HOTPREFIX_LISTEN_PORT": "1",
        "HOTPREFIX_CONFIG": "/none",
    }
    argv = ["--config", str(file)]
    assert settings.NODE.load(argv, {}).config.name == "of-file"
    assert settings.NODE.load(argv, variables).config.name == "of-variable"
    loaded = settings.NODE.load([*argv, "--name", "of-flag", "--eviction", "lru"], variables)
    assert loaded.config.name == "of-flag"
    assert loaded.config.eviction == {"name": "lru"}
    assert loaded.config.memory.bytes == 2_000_000
    assert settings.NODE.load([], {"HOTPREFIX_NODE_CONFIG": str(file)}).config.name == "of-file"
    assert settings.load([], {"HOTPREFIX_NODE_NAME": "x", "HOTPREFIX_NODE_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--nme", "x"], {}, "did you mean --name"),
        ([], {"HOTPREFIX_NODE_SOKET": "x"}, "did you mean HOTPREFIX_NODE_SOCKET"),
        (["--name", "a b"], {}, "is no name"),
        (["--socket", "/" + "x" * 200], {}, "choose a shorter path"),
        (["--memory-bytes", "5"], {}, "memory.bytes: is 5"),
        (["--memory-bytes", "lots"], {}, "memory.bytes"),
        (["--memory-records", "-1"], {}, "memory.records"),
        (["--events-endpoint", "tcp://0.0.0.0:1"], {}, "set events.allow_remote"),
        (["--events-endpoint", "udp://x"], {}, "is no ipc://"),
        (["--events-endpoint", "ipc:///a", "--events-replay", "ipc:///a"], {}, "give it another"),
        (["--admin-host", "0.0.0.0"], {}, "set keys_file"),
        (["--admin-host", ""], {}, "is empty"),
        (["--admin-port", "70000"], {}, "ports go from"),
        (["--eviction", "lirz"], {}, "did you mean 'lirs'"),
        (["--eviction", "{name: lirs, x: 1}"], {}, "no parameter 'x'"),
    ],
)
def test_what_is_wrong_is_said(argv: list[str], environ: dict[str, str], says: str) -> None:
    with pytest.raises(settings.SettingsError, match=re.escape(says)):
        settings.NODE.load(argv, environ)


def test_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings.check(["--node", str(EXAMPLE)]) == 0
    assert settings.show(["--node", "--name", "n"]) == 0
    out = capsys.readouterr().out
    assert re.search(r'^name +"n" +--name', out, re.MULTILINE)
    assert "eviction.probation" in out
    assert settings.check(["--node"]) == 2
    assert "--node" in capsys.readouterr().err
