"""deploy/gateway.example.yaml is the reference of the configuration, so it is held against the schema."""

import random
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.config import Events, Gateway, Node, NodeEvents, Worker
from hotprefix import settings
from policies.routing import POLICIES, build

EXAMPLE = Path(__file__).parents[2] / "deploy" / "gateway.example.yaml"
POLICY_LINES = re.findall(r"^(?:# )?policy: (\{.*\})$", EXAMPLE.read_text(), re.MULTILINE)


def test_it_loads() -> None:
    config = settings.load(["--config", str(EXAMPLE)], {}).config
    assert [worker.name for worker in config.workers] == ["w0", "w1"]


def test_it_says_every_key_of_the_schema_and_its_default() -> None:
    written = yaml.safe_load(EXAMPLE.read_text())
    defaults = msgspec.to_builtins(Gateway())
    for key in settings.GATEWAY.leaves:
        said, default = written, defaults
        for part in key.split("."):
            assert part in said, f"{key} is missing"
            said, default = said[part], default[part]
        if key not in ("workers", "nodes", "policy"):
            assert said == default, f"{key} is not its default"
    first = written["workers"][0]
    assert set(first) == set(Worker.__struct_fields__)
    assert set(first["events"]) == set(Events.__struct_fields__)
    node = written["nodes"][0]
    assert set(node) == set(Node.__struct_fields__)
    assert set(node["events"]) == set(NodeEvents.__struct_fields__)


def test_its_policy_lines_are_the_table_with_every_parameter_at_its_default() -> None:
    specs = [yaml.safe_load(line) for line in POLICY_LINES]
    assert sorted(spec["name"] for spec in specs) == sorted(POLICIES)
    for spec in specs:
        schema, _ = POLICIES[spec["name"]]
        assert {**msgspec.to_builtins(schema()), "name": spec["name"]} == spec


@pytest.mark.parametrize("line", POLICY_LINES)
def test_each_policy_line_loads(line: str, tmp_path: Path) -> None:
    text = re.sub(r"^policy: .*$", lambda _: f"policy: {line}", EXAMPLE.read_text(), flags=re.MULTILINE)
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    config = settings.load(["--config", str(file)], {}).config
    build(config.policy, random.Random(0))
