"""What types cannot say about a configuration. Each mistake is told with what to do about it."""

from typing import Any

import msgspec
import pytest

from gateway.config import Gateway
from gateway.config_check import is_loopback, problems


def told(**given: Any) -> list[str]:
    tree = msgspec.to_builtins(Gateway())
    for key, value in given.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and key != "policy" else value
    return [f"{key}: {text}" for key, text in problems(msgspec.convert(tree, Gateway))]


def worker(name: str = "a", url: str = "http://a:1", **more: Any) -> dict[str, Any]:
    return {"name": name, "url": url, **more}


def node(name: str = "n", endpoint: str = "ipc:///n", replay: str = "ipc:///r") -> dict[str, Any]:
    return {"name": name, "events": {"endpoint": endpoint, "replay": replay}}


def test_the_defaults_are_good() -> None:
    assert told() == []


GOOD: list[dict[str, Any]] = [
    {"workers": [worker(), worker("b", "https://b")]},
    {"workers": [worker(rank=0), worker("b", rank=1)]},  # one engine with two data-parallel ranks
    {"workers": [worker(url="http://user.example:8000/prefix/")]},
    {"workers": [worker(url="http://[::1]:8000")]},
    {"workers": [worker(events={"endpoint": "tcp://10.0.0.1:5557", "replay": "tcp://10.0.0.1:5558"})]},
    {"workers": [worker(events={"endpoint": "tcp://127.0.0.1:5557", "bind": True})]},
    {"workers": [worker(events={"endpoint": "ipc:///run/a.sock", "bind": True})]},
    {"nodes": [node(), node("m", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2")], "workers": [worker(node="m")]},
    {"listen": {"host": "0.0.0.0"}, "keys_file": "keys.yaml"},
    {"listen": {"host": "localhost", "port": 0}, "admin": {"host": "::1", "port": 0}},
    {"seed": -5},
    {"upstream": {"retry_share": 0.0, "retry_floor": 0.0}},
]


@pytest.mark.parametrize("given", GOOD)
def test_good(given: dict[str, Any]) -> None:
    assert told(**given) == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"workers": [worker(), worker(url="http://b:1")]}, "workers[1].name: a is also the name of workers[0]"),
    ({"workers": [worker(), worker("b")]}, "workers[1].url: is the same engine as workers[0]"),
    ({"workers": [worker(), worker("b", "http://a:1/")]}, "workers[1].url: is the same engine as workers[0]"),
    ({"workers": [worker("")]}, "workers[0].name: must be 1 to 128 letters"),
    ({"workers": [worker("a\nb")]}, "workers[0].name: must be 1 to 128 letters"),
    ({"workers": [worker(url="a:1")]}, "workers[0].url: must begin with http:// or https://"),
    ({"workers": [worker(url="unix:///a")]}, "workers[0].url: must begin with http:// or https://"),
    ({"workers": [worker(url="http://")]}, "workers[0].url: names no host"),
    ({"workers": [worker(url="http://a b")]}, "workers[0].url: names no host"),
    ({"workers": [worker(url="http://a:99999")]}, "workers[0].url: is no URL"),
    ({"workers": [worker(url="http://[::1")]}, "workers[0].url: is no URL"),
    ({"workers": [worker(url="http://a:0")]}, "workers[0].url: has port 0"),
    ({"workers": [worker(url="http://u:p@a:1")]}, "workers[0].url: holds credentials; give them as api_key"),
    ({"workers": [worker(url="http://a:1?x")]}, "workers[0].url: must end before '?' and '#'"),
    ({"workers": [worker(url="http://a:1/v1")]}, "workers[0].url: must be given without /v1"),
    ({"workers": [worker(rank=-1)]}, "workers[0].rank: is -1; must not be negative"),
    ({"workers": [worker(events={"endpoint": "http://a"})]}, "workers[0].events.endpoint: must be tcp://"),
    ({"workers": [worker(events={"endpoint": "tcp://a"})]}, "workers[0].events.endpoint: must be tcp://"),
    ({"workers": [worker(events={"endpoint": "tcp://*:1"})]}, "workers[0].events.endpoint: names no host"),
    (
        {"workers": [worker(events={"endpoint": "tcp://a:1", "replay": "tcp://*:2"})]},
        "workers[0].events.replay: names no host",
    ),
    (
        {"workers": [worker(events={"endpoint": "tcp://*:1", "bind": True})]},
        "workers[0].events.endpoint: would accept events from other machines on *",
    ),
    (
        {"workers": [worker(events={"endpoint": "tcp://10.0.0.1:1", "bind": True})], "keys_file": "k"},
        "workers[0].events.endpoint: would accept events from other machines on 10.0.0.1",
    ),
    (
        {
            "workers": [
                worker(events={"endpoint": "tcp://a:1"}),
                worker("b", "http://b:1", events={"endpoint": "tcp://a:1"}),
            ]
        },
        "workers[1].events.endpoint: is also that of workers[0]",
    ),
    ({"nodes": [node("")]}, "nodes[0].name: must be 1 to 128 letters"),
    (
        {"nodes": [node(), node(endpoint="ipc:///x", replay="ipc:///y")]},
        "nodes[1].name: n is also the name of nodes[0]",
    ),
    ({"nodes": [node("a")], "workers": [worker()]}, "nodes[0].name: a is also the name of workers[0]"),
    ({"nodes": [node(endpoint="n")]}, "nodes[0].events.endpoint: must be tcp://"),
    ({"nodes": [node(replay="tcp://*:1")]}, "nodes[0].events.replay: names no host"),
    (
        {"nodes": [node(replay="ipc:///n")]},
        "nodes[0].events.replay: is also nodes[0].events.endpoint; give each its own",
    ),
    (
        {"nodes": [node(endpoint="ipc:///a")], "workers": [worker(events={"endpoint": "ipc:///a"})]},
        "nodes[0].events.endpoint: is also workers[0].events.endpoint",
    ),
    ({"workers": [worker(node="n")]}, "workers[0].node: n is none of nodes; add it there"),
    (
        {"listen": {"host": "0.0.0.0"}},
        "listen.host: 0.0.0.0 can be reached from other machines; set keys_file",
    ),
    ({"listen": {"host": "gateway.local"}}, "listen.host: gateway.local can be reached"),
    ({"admin": {"host": "::"}}, "admin.host: :: can be reached from other machines"),
    ({"listen": {"host": ""}}, "listen.host: is empty"),
    ({"admin": {"port": 8000}}, "admin.port: is 8000 for both listeners"),
    ({"listen": {"port": 65_536}}, "listen.port: is 65536; ports end at 65535"),
    ({"listen": {"port": -1}}, "listen.port: is -1; must not be negative"),
    ({"limits": {"body_bytes": 0}}, "limits.body_bytes: is 0; must be greater"),
    ({"health": {"interval_s": -0.5}}, "health.interval_s: is -0.5; must not be negative"),
    ({"health": {"interval_s": float("nan")}}, "health.interval_s: must be a finite number"),
    ({"upstream": {"idle_s": float("inf")}}, "upstream.idle_s: must be a finite number"),
    (
        {"upstream": {"retry_share": 1.5}},
        "upstream.retry_share: is 1.5; is a share of the requests, from 0 to 1",
    ),
    ({"session_header": "x session"}, "session_header: must be the name of a header"),
    ({"session_header": "Authorization"}, "session_header: must be the name of a header that is free"),
    ({"policy": {}}, "policy.name: policy needs a name, one of round-robin, random,"),
    ({"policy": {"name": "prefx"}}, "policy.name: there is no policy 'prefx' (did you mean 'prefix'?)"),
    (
        {"policy": {"name": "prefix", "slack": 1}},
        "policy.slack: policy prefix has no parameter 'slack'",
    ),
    (
        {"policy": {"name": "prefix", "slack_tokens": -1}},
        "policy.slack_tokens: policy prefix: slack_tokens: expected int >= 0",
    ),
    (
        {"policy": {"name": "consistent-hash", "bound": float("nan")}},
        "policy.bound: policy consistent-hash: bound: expected float >= 1.0",
    ),
    ({"policy": {"name": "random", "x": 1}}, "policy.x: policy random has no parameter 'x'; it takes none"),
    ({"policy": {"name": "no_such_module:P"}}, "policy.name: policy 'no_such_module:P' cannot be imported"),
    ({"policy": {"name": "random:Random"}}, "policy.name: policy 'random:Random' needs an attribute Params"),
]


@pytest.mark.parametrize(("given", "problem"), BAD)
def test_bad(given: dict[str, Any], problem: str) -> None:
    found = told(**given)
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("*", False), ("10.0.0.1", False), ("", False),
        ("localhost.example.com", False), ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
