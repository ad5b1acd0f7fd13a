"""``config show`` and ``config check``: every key with its origin, and no secret."""

import json
from pathlib import Path

import pytest
import yaml

from gateway.config import Gateway
from hotprefix import settings
from hotprefix.cli import main

SECRET = "hunter2"
WORKERS = json.dumps([{"name": "a", "url": "http://a:1", "api_key": SECRET}])


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Key -> value, origin."""
    split = [line.split(None, 1) for line in text.splitlines()]
    return {key: (rest.rsplit("  ", 1)[0].strip(), rest.rsplit("  ", 1)[1]) for key, rest in split}


def test_the_table_has_every_key_its_value_and_its_origin(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("index:\n  bytes: 5\npolicy:\n  name: prefix\n  slack_tokens: 1\n")
    monkeypatch.setenv("HOTPREFIX_SEED", "3")
    assert main(["config", "show", "--config", str(file), "--port", "1"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["index.bytes"] == ("5", f"file {file}:2")
    assert shown["seed"] == ("3", "HOTPREFIX_SEED")
    assert shown["listen.port"] == ("1", "--port")
    assert shown["policy.slack_tokens"] == ("1", f"file {file}:5")
    assert shown["policy.running_tokens"] == ("128", "default")  # the policy's own defaults too
    assert shown["keys_file"] == ("null", "default")
    assert set(settings.GATEWAY.leaves) - set(shown) == {"policy"}


def test_json_is_a_configuration_and_its_origins(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "show", "--json", "--workers", "http://a:1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["origins"]["workers[0].url"] == "--workers"
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(shown["config"]))
    again = settings.load(["--config", str(file)], {})
    assert again.config.workers == settings.load(["--workers", "http://a:1"], {}).config.workers
    assert again.config.limits == Gateway().limits


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_secrets_are_hidden(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", WORKERS, "--secret-file", f"redis://user:{SECRET}@h", *form]
    assert main(["config", "show", *words]) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert "***" in shown
    assert "redis://***@h" in shown


def test_every_secret_named_is_a_key() -> None:
    # A renamed key would be shown; its old name would hide nothing.
    assert settings.GATEWAY.secrets == ("workers[].api_key",)
    config = settings.load(["--workers", WORKERS], {}).config
    assert config.workers[0].api_key == SECRET


def test_a_bad_configuration_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--seed", "x", "--polcy", "prefix"]) == 2
    caught = capsys.readouterr()
    assert "--seed: seed: expected int, got str" in caught.err
    assert "did you mean --policy?" in caught.err
    assert not caught.out


def test_check_looks_at_the_file_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTPREFIX_SEED", "x")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("policy: random\n")
    bad.write_text("policy: randm\n")
    assert main(["config", "check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: ok\n"
    assert main(["config", "check", str(bad)]) == 2
    assert (
        f"{bad}:1: policy.name: there is no policy 'randm' (did you mean 'random'?)"
        in capsys.readouterr().err
    )
    assert main(["config", "check"]) == 2
    assert main(["config", "check", "--help"]) == 0


def test_usage_lists_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--help"]) == 0
    text = capsys.readouterr().out
    for leaf in settings.GATEWAY.leaves.values():
        assert f"{leaf.flag}" in text
        assert leaf.variable in text
    assert all(alias in text for alias in settings.GATEWAY.aliases)
