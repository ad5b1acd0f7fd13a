"""What an operator writes, and what the connector answers."""

from pathlib import Path
from typing import Any

import pytest

from cachenode.connectors.adapters import Adapters, digest_of
from cachenode.connectors.options import BadSetup, check_policy, read_options, read_secret
from cachenode.connectors.revision import revision_of

GOOD = {"hotprefix.socket": "/run/node.sock", "hotprefix.worker": "e1"}


def test_options_have_defaults_and_leave_other_keys_alone() -> None:
    options = read_options({**GOOD, "other.socket": 1})
    assert (options.socket, options.worker, options.mode, options.hold) == (
        "/run/node.sock",
        "e1",
        "map",
        0.5,
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, '"hotprefix.socket"'),
        ({"hotprefix.socket": "x"}, '"hotprefix.worker"'),
        ({**GOOD, "hotprefix.hodl": 1}, "did you mean hotprefix.hold"),
        ({**GOOD, "hotprefix.hold": 0}, "more than 0"),
        ({**GOOD, "hotprefix.hold": "half"}, "hold"),
        ({**GOOD, "hotprefix.mode": "share"}, "mode"),
    ],
)
def test_mistakes_say_what_to_write(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetup, match=message):
        read_options(extra)


def test_another_failure_policy_is_refused() -> None:
    check_policy("recompute")
    with pytest.raises(BadSetup, match='write "kv_load_failure_policy": "recompute"'):
        check_policy("fail")


def test_a_secret_is_read_like_the_gateways(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert read_secret(None) is None
    with pytest.raises(BadSetup, match="No such file"):
        read_secret(str(file))
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(BadSetup, match="chmod 600"):
        read_secret(str(file))
    file.chmod(0o600)
    assert read_secret(str(file)) == b"0123456789abcdef"
    file.write_bytes(b"short")
    with pytest.raises(BadSetup, match="at least 16"):
        read_secret(str(file))


def test_a_revision_is_what_the_files_hold(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    assert revision_of(one, "", {"a": 1}) == revision_of(two, "", {"a": 1, "_name_or_path": "x"})
    assert revision_of(one, "", {"a": 1}) != revision_of(one, "", {"a": 2})
    (tmp_path / "two" / "config.json").write_text('{"a": 1}')
    assert revision_of(one, "", {}) != revision_of(two, "", {})
    weights = bytearray(3 * 1024 * 1024)
    for name in ("one", "two"):
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        weights[2_000_000:2_100_000] = b"x" * 100_000
    assert revision_of(one, "", {}) != revision_of(two, "", {})
    assert revision_of("org/name", "main", {}) != revision_of("org/name", "v2", {})


def test_an_adapters_digest_is_read_in_the_background_once(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter.safetensors").write_bytes(b"weights")
    waiting: list[Any] = []
    adapters = Adapters(waiting.append)
    assert adapters.digest(str(folder), 1) is None
    assert adapters.digest(str(folder), 1) is None
    assert len(waiting) == 1
    waiting.pop()()
    digest = adapters.digest(str(folder), 1)
    assert digest == digest_of(folder)
    (folder / "adapter.safetensors").write_bytes(b"other weights")
    assert adapters.digest(str(folder), 1) is None, "which files the engine loaded is not known any more"
    assert adapters.digest(str(folder), 2) is None
    waiting.pop()()
    assert adapters.digest(str(folder), 2) not in (None, digest)


def test_an_adapter_that_is_no_folder_has_no_digest(tmp_path: Path) -> None:
    adapters = Adapters(lambda work: work())
    assert adapters.digest(str(tmp_path / "none"), 1) is None
    assert adapters.digest(str(tmp_path / "none"), 1) is None
    assert adapters.errors == 1
