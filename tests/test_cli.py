"""The command table: every entry exists, help is quick to make, mistakes get one line."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hotprefix import cli
from hotprefix.commands import make_key
from hotprefix.errors import CommandError, NoEngine, UserError


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_exists(name: str) -> None:
    assert callable(cli.load(cli.COMMANDS[name].target))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main([*name.split(), "--help"])
    except SystemExit as done:
        status = int(done.code or 0)
    assert status == 0
    assert "usage:" in "".join(capsys.readouterr())


def test_help_loads_no_command() -> None:
    program = (
        "import sys; from hotprefix.cli import main; main(['--help']); "
        "print([name for name in sys.modules if name.partition('.')[0] in ('gateway', 'aiohttp', 'msgspec')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["upp"], "there is no command upp, did you mean up?"),
        (["keys"], "hotprefix keys needs one of: new"),
        (["config", "sow"], "hotprefix config needs one of: show, check"),
        (["--what"], "there is no command --what"),
    ],
)
def test_unknown_commands_get_a_line(
    arguments: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("error", "status"), [(CommandError, 1), (UserError, 2), (NoEngine, 3)])
def test_statuses_follow_from_the_error_tree(
    error: type[CommandError], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_arguments: Sequence[str]) -> int:
        raise error("why")

    monkeypatch.setattr(importlib.import_module("hotprefix.commands"), "version", fail)
    assert cli.main(["version"]) == status


def test_a_new_key_fits_its_entry(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert make_key(["acme"]) == 0
    printed = capsys.readouterr()
    key, entry = printed.out.strip(), json.loads(printed.err.split("- ", 1)[1])
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text(json.dumps({"keys": [entry]}))
    tenants = importlib.import_module("gateway.tenants").load_tenants(str(keys_file), b"s" * 16)
    assert tenants.who(f"Bearer {key}").name == "acme"
    assert key not in printed.err
