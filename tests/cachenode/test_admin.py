"""A whole node as a process: its admin API, its key, and its ends."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachenode.record import moved, realm
from gateway.tenants import new_key
from hotprefix.local_node import LocalNode
from hotprefix.processes import RunFolder, wait_until
from tests.cachenode.nodes import BLOCK, ask, client, connect
from tests.cachenode.stores import layout, prompt

MIB = 1024 * 1024


def call(node: LocalNode, path: str, body: object = None, key: str = "") -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(node.url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] == b"{" else text.decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    made = RunFolder()
    yield made
    made.remove()


@pytest.fixture
def node(folder: RunFolder, tmp_path: Path) -> Iterator[LocalNode]:
    made = LocalNode(folder, tmp_path, memory_bytes=64 * MIB)
    made.wait_ready()
    yield made
    made.stop()


def test_status_metrics_pin_and_clear(node: LocalNode) -> None:
    text, fingerprint = prompt(1, 12), layout(BLOCK).fingerprint()
    made = connect(client(Path(node.socket)))
    reserved = ask(made, made.reserve(0, text.keys, text.proofs))
    made.commit([grant.reservation for grant in reserved.grants])  # type: ignore[union-attr]
    ask(made, made.ping())
    status = call(node, "/v1/status")[1]
    figures = status["figures"]
    assert figures["blocks"] == 12
    assert status["serves"] == [["w", fingerprint]]
    assert status["sessions"] == 1
    parts = ("free", "used", "leased", "reserved", "quarantined")
    assert sum(figures[part] for part in parts) == figures["total"] == 64 * MIB
    keys = [text.keys[at : at + 16].hex() for at in range(0, 192, 16)]
    assert call(node, "/v1/pin", {"layout": fingerprint, "keys": keys}) == (200, {"blocks": 12})
    metrics = call(node, "/metrics")[1]
    assert "hotprefix_node_stored_blocks_total 12.0" in metrics
    assert "hotprefix_node_pinned_records 2.0" in metrics
    assert call(node, "/v1/unpin", {"layout": fingerprint, "keys": keys}) == (200, {"blocks": 12})
    assert call(node, "/v1/clear", {"layout": "other"}) == (200, {"records": 0})
    assert call(node, "/v1/clear", b"") == (200, {"records": 2})
    assert wait_until(lambda: made.match("", text.keys, text.proofs) == 0, 10.0)
    assert moved(text.keys, realm(fingerprint, "")) != text.keys
    made.close()


def test_bad_requests_are_answered(node: LocalNode) -> None:
    assert call(node, "/v1/clear") == (405, {"error": {"message": "/v1/clear takes POST"}})
    assert call(node, "/v1/status", {})[0] == 405
    assert call(node, "/nothing")[0] == 404
    for path, body in [
        ("/v1/clear", b"\xff"),
        ("/v1/clear", {"what": 1}),
        ("/v1/pin", {}),
        ("/v1/pin", {"layout": "x", "keys": []}),
        ("/v1/pin", {"layout": "x", "keys": ["00"]}),
        ("/v1/pin", {"layout": "x", "keys": ["z" * 32]}),
        ("/v1/pin", b"[" * 100_000),
    ]:
        status, answer = call(node, path, body)
        assert (status, "the body" in answer["error"]["message"]) == (400, True), (path, body)
    assert call(node, "/v1/pin", b"x" * (5 * MIB))[0] == 413
    plain = urllib.request.Request(node.url + "/v1/clear", b"{}", {"content-type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError, match="415"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(plain, timeout=20)
    assert call(node, "/health") == (200, {"status": "ok"})


def test_a_key_opens_it(folder: RunFolder, tmp_path: Path) -> None:
    (admin, entry), (other, second) = new_key("ops", admin=True), new_key("app", admin=False)
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [msgspec.to_builtins(entry), msgspec.to_builtins(second)]}))
    node = LocalNode(folder, tmp_path, memory_bytes=64 * MIB, config={"keys_file": str(file)})
    try:
        node.wait_ready()
        for key in ("", other, admin + "x", "\u00e9".encode().decode("latin-1")):
            assert call(node, "/v1/status", key=key)[0] == 401
        assert call(node, "/v1/clear", {}, key=other)[0] == 401
        assert call(node, "/v1/status", key=admin)[0] == 200
        assert call(node, "/ready")[0] == 200
    finally:
        node.stop()


@pytest.mark.parametrize(
    ("size", "config", "says"),
    [
        (2**46, {}, "give less"),
        (64 * MIB, {"keys_file": "/nowhere/keys.yaml"}, "keys_file /nowhere/keys.yaml"),
        (64 * MIB, {"eviction": {"name": "lirz"}}, "did you mean 'lirs'"),
    ],
)
def test_starts_that_are_refused(
    folder: RunFolder, tmp_path: Path, size: int, config: dict[str, Any], says: str
) -> None:
    node = LocalNode(folder, tmp_path, memory_bytes=size, config=config)
    try:
        assert wait_until(lambda: node.exit_code is not None, 30.0)
        assert node.exit_code == 2
        assert says in node.tail()
        assert "Traceback" not in node.tail(100)
    finally:
        node.stop()


def test_two_nodes_on_one_socket(node: LocalNode, folder: RunFolder, tmp_path: Path) -> None:
    second = LocalNode(folder, tmp_path / "second", memory_bytes=64 * MIB)
    try:
        assert wait_until(lambda: second.exit_code is not None, 30.0)
        assert second.exit_code == 2
        assert "a node is running on" in second.tail()
    finally:
        second.stop()
    assert call(node, "/ready")[0] == 200


def test_it_ends_cleanly_and_comes_back_after_a_crash(node: LocalNode) -> None:
    made = connect(client(Path(node.socket)))
    first = made.boot
    node.kill()
    node.restart()
    node.wait_ready()

    def back() -> bool:
        made.poll()
        return made.connected and made.boot != first

    assert wait_until(back, 20.0)
    made.close()
    node._child.ask_to_stop()
    assert wait_until(lambda: node.exit_code is not None, 20.0)
    assert node.exit_code == 0
    assert not Path(node.socket).exists()
