"""What a configuration must be beyond its types, in one place. Pure: opens no file, resolves no name."""

import ipaddress
import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from gateway.config import Events, Gateway, Listen, Node, Worker
from policies import routing

MAY_BE_ZERO = ("port", "seed", "retry_share", "retry_floor", "predicted_s")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
HEADER = re.compile(r"[a-z0-9][a-z0-9-]{0,63}", re.IGNORECASE)
TAKEN_HEADERS = ("authorization", "content-length", "content-type", "cookie", "host", "transfer-encoding")

Problem = tuple[str, str]
"""A dotted key and what is wrong with it, with what to do about it."""


def problems(config: Gateway) -> list[Problem]:
    """Everything that would keep a gateway from starting, or from being safe, with this configuration."""
    return [
        *_numbers(msgspec.to_builtins(config), ""),
        *_listeners(config),
        *_workers(config.workers),
        *_nodes(config.nodes, config.workers),
        *_policy(config.policy),
        *_headers(config),
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``. Names other than localhost cannot be
    known without asking, and count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _numbers(section: dict[str, object], prefix: str) -> Iterator[Problem]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and name != "policy":
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif not math.isfinite(value):
            yield key, "must be a finite number; leave it out for the default"
        elif value < 0 and name != "seed":
            yield key, f"is {value}; must not be negative"
        elif value >= 2**62:
            yield key, "is too large"
        elif value == 0 and name not in MAY_BE_ZERO:
            yield key, "is 0; must be greater"
        elif name == "port" and value > 65_535:
            yield key, f"is {value}; ports end at 65535"
        elif name == "retry_share" and value > 1:
            yield key, f"is {value}; is a share of the requests, from 0 to 1"


def _listeners(config: Gateway) -> Iterator[Problem]:
    both: tuple[tuple[str, Listen], ...] = (("listen", config.listen), ("admin", config.admin))
    for key, listen in both:
        if not listen.host:
            yield f"{key}.host", "is empty; give 127.0.0.1, or 0.0.0.0 for all interfaces"
        elif not is_loopback(listen.host) and config.keys_file is None:
            yield (
                f"{key}.host",
                f"{listen.host} can be reached from other machines; set keys_file (`hotprefix keys new NAME` "
                "makes a key), or listen on 127.0.0.1",
            )
    if config.listen == config.admin and config.listen.port:
        yield "admin.port", f"is {config.admin.port} for both listeners; give one of them another port"


def _workers(workers: list[Worker]) -> Iterator[Problem]:
    names: dict[str, int] = {}
    places: dict[tuple[str, int | None], int] = {}
    endpoints: dict[str, int] = {}
    for number, worker in enumerate(workers):
        key = f"workers[{number}]"
        if not NAME.fullmatch(worker.name):
            yield f"{key}.name", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'"
        if (first := names.setdefault(worker.name, number)) != number:
            yield f"{key}.name", f"{worker.name} is also the name of workers[{first}]; names must differ"
        url = worker.url.rstrip("/")
        if trouble := _bad_url(url):
            yield f"{key}.url", trouble
        elif (first := places.setdefault((url, worker.rank), number)) != number:
            yield (
                f"{key}.url",
                f"is the same engine as workers[{first}]; remove one, or give their data-parallel ranks",
            )
        if worker.rank is not None and worker.rank < 0:
            yield f"{key}.rank", f"is {worker.rank}; must not be negative"
        if worker.events:
            for part, text in _events(worker.events):
                yield f"{key}.events.{part}", text
            if (first := endpoints.setdefault(worker.events.endpoint, number)) != number:
                yield (
                    f"{key}.events.endpoint",
                    f"is also that of workers[{first}]; each worker publishes on one of its own",
                )


def _nodes(nodes: list[Node], workers: list[Worker]) -> Iterator[Problem]:
    names: dict[str, str] = {worker.name: f"workers[{number}]" for number, worker in enumerate(workers)}
    places: dict[str, str] = {
        worker.events.endpoint: f"workers[{number}].events.endpoint"
        for number, worker in enumerate(workers)
        if worker.events
    }
    for number, node in enumerate(nodes):
        key = f"nodes[{number}]"
        if not NAME.fullmatch(node.name):
            yield f"{key}.name", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'"
        if (first := names.setdefault(node.name, key)) != key:
            yield f"{key}.name", f"{node.name} is also the name of {first}; names must differ"
        events = Events(endpoint=node.events.endpoint, replay=node.events.replay)
        for part, text in _events(events):
            yield f"{key}.events.{part}", text
        for part, endpoint in (("endpoint", events.endpoint), ("replay", node.events.replay)):
            place = f"{key}.events.{part}"
            if (first := places.setdefault(endpoint, place)) != place:
                yield place, f"is also {first}; give each its own"
    known = {node.name for node in nodes}
    for number, worker in enumerate(workers):
        if worker.node is not None and worker.node not in known:
            yield (
                f"workers[{number}].node",
                f"{worker.node} is none of nodes; add it there",
            )


def _bad_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "is no URL; give something like http://127.0.0.1:8100"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not parts.hostname or re.search(r"[\s\x00-\x1f]", url):
        return "names no host; give something like http://127.0.0.1:8100"
    if port == 0:
        return "has port 0; give the engine's port"
    if parts.username is not None or parts.password is not None:
        return "holds credentials; give them as api_key"
    if parts.query or parts.fragment:
        return "must end before '?' and '#'"
    if parts.path.endswith("/v1"):
        return "must be given without /v1, which is added"
    return ""


def _events(events: Events) -> Iterator[Problem]:
    for part, endpoint in (("endpoint", events.endpoint), ("replay", events.replay)):
        if endpoint is None:
            continue
        scheme, _, rest = endpoint.partition("://")
        if scheme == "ipc" and rest:
            continue
        host, _, port = rest.rpartition(":")
        binds = events.bind and part == "endpoint"
        if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) <= 65_535:
            yield part, "must be tcp://HOST:PORT or ipc://PATH"
        elif binds and not is_loopback(host):
            yield (
                part,
                f"would accept events from other machines on {host}; bind 127.0.0.1 or ipc://, or let the "
                "engine bind and leave bind out",
            )
        elif not binds and host in ("*", "0.0.0.0", "::", "[::]"):
            yield part, f"names no host to connect to; {host} is what the engine binds, give its address"


def _policy(spec: dict[str, object]) -> Iterator[Problem]:
    try:
        routing.params(spec)
    except routing.BadPolicy as error:
        yield f"policy.{error.parameter}", str(error)


def _headers(config: Gateway) -> Iterator[Problem]:
    name = config.session_header
    if not HEADER.fullmatch(name) or name.lower() in TAKEN_HEADERS:
        yield "session_header", "must be the name of a header that is free for it, such as x-session-id"
