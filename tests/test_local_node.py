"""How engines, gateway and node are told of each other, and a real node as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hotprefix.engines import Engine, EngineSpec, connector_flags, connector_path, vllm_command
from hotprefix.home import Home
from hotprefix.local_gateway import LocalGateway
from hotprefix.local_node import LocalNode
from hotprefix.processes import RunFolder, wait_until


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    made = RunFolder()
    yield made
    made.remove()


def test_an_engine_is_told_its_node_and_its_name_there(tmp_path: Path) -> None:
    spec = EngineSpec(name="engine-1", model="m", node="/run/node.sock")
    command = vllm_command(spec, Home(tmp_path), 1, None)
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "HotprefixConnector"
    assert config["kv_connector_module_path"] == "cachenode.connectors.vllm"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "hotprefix.socket": "/run/node.sock",
        "hotprefix.worker": "engine-1",
    }
    assert connector_flags("/run/node.sock", "engine-1") == command[-2:]
    assert json.loads(connector_flags("/s", "e", "/secret")[1])["kv_connector_extra_config"] == {
        "hotprefix.socket": "/s",
        "hotprefix.worker": "e",
        "hotprefix.secret_file": "/secret",
    }
    assert "--kv-transfer-config" not in vllm_command(
        msgspec.structs.replace(spec, node=None), Home(tmp_path), 1, None
    )


def test_an_engine_may_have_a_python_of_its_own(tmp_path: Path) -> None:
    spec = EngineSpec(name="e", model="m")
    assert vllm_command(spec, Home(tmp_path), 1, None)[0] == str(tmp_path / "engine" / "bin" / "python")
    assert vllm_command(msgspec.structs.replace(spec, python="/p"), Home(tmp_path), 1, None)[0] == "/p"


def test_an_engine_sees_the_connector_and_nothing_else_of_ours(folder: RunFolder) -> None:
    path = connector_path(folder)
    assert connector_path(folder) == path
    assert sorted(os.listdir(path)) == ["cacheindex", "cachenode", "policies"]
    program = (
        "import cachenode.wire, importlib.util as u; print(u.find_spec('gateway'), u.find_spec('hotprefix'))"
    )
    site = Path(msgspec.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{site}"},
        cwd=folder.path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["None", "None"]


def test_real_engines_do_not_start_in_the_folder_of_the_caller(folder: RunFolder, tmp_path: Path) -> None:
    """Python looks for modules there first: another copy of the project would be taken for this one."""
    home = Home(tmp_path / "home")
    python = home.engine / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\\necho "in $(pwd) path $PYTHONPATH"\\n'.replace("\\n", "\n"))
    python.chmod(0o755)
    engine = Engine(EngineSpec(name="e", model="m", node="/n.sock"), home, folder, tmp_path / "log")
    try:
        assert wait_until(lambda: engine.exit_code == 0, 10)
        assert engine.tail() == f"in {folder.path} path {folder.path / 'python'}"
    finally:
        engine.stop()


def test_a_gateway_is_told_which_engine_uses_which_node(folder: RunFolder, tmp_path: Path) -> None:
    """What is written is looked at; a gateway that runs with it is the business of tests/gateway."""
    home = Home(tmp_path / "home")
    node = LocalNode(folder, tmp_path, memory_bytes=64 << 20)
    engines = [
        Engine(EngineSpec(name=name, model="m", node=socket), home, folder, tmp_path / name)
        for name, socket in (("with", node.socket), ("without", None))
    ]
    gateway = LocalGateway(engines, folder, tmp_path, nodes=[node])
    try:
        written = msgspec.yaml.decode(next(folder.path.glob("gateway-*.yaml")).read_bytes())
        events = {"endpoint": node.events, "replay": node.replay}
        assert written["nodes"] == [{"name": "node", "events": events}]
        assert [worker.get("node") for worker in written["workers"]] == ["node", None]
    finally:
        gateway.stop()
        for engine in engines:
            engine.stop()
        node.stop()


def test_a_node_becomes_ready_dies_and_comes_back(folder: RunFolder, tmp_path: Path) -> None:
    node = LocalNode(folder, tmp_path, memory_bytes=64 << 20)
    try:
        node.wait_ready()
        assert Path(node.socket).is_socket()
        assert Path(node.socket).stat().st_mode & 0o777 == 0o600
        before = node.pid
        node.kill()
        assert node.exit_code == 137
        node.restart()
        node.wait_ready()
        assert node.pid != before
    finally:
        node.stop()
    assert node.exit_code == 0
