"""The control endpoint of a simulated engine: ``/sim/…``, beside its API on loopback.

``GET|POST /sim/faults`` shows or changes switches, ``POST /sim/restart`` restarts
(``{"seq": "zero"|"continue"}``), ``GET /sim/truth`` lists what is cached, ``GET /sim/requests``
what was asked (bodies as base64), ``GET /sim/stats`` counts.
"""

import base64
from collections.abc import Callable
from typing import Protocol

import msgspec

from loadtest.sim.app import App
from loadtest.sim.ask import Refused, read_object
from loadtest.sim.config import Faults, RestartSeq
from loadtest.sim.http import Reply, Request


class Controlled(Protocol):
    """What the control endpoint needs of an engine."""

    @property
    def app(self) -> App: ...

    @property
    def next_seq(self) -> int: ...

    def set_faults(self, **changes: object) -> Faults: ...

    def restart_soon(self, seq: RestartSeq) -> None: ...


def handle(engine: Controlled, request: Request, reply: Reply) -> bool:
    """Answer ``/sim/…``; False when the path is none of ours."""
    if not request.path.startswith("/sim/"):
        return False
    routes: dict[tuple[str, str], Callable[[Controlled, Request], object]] = {
        ("GET", "/sim/faults"): lambda e, _: e.app.faults.now,
        ("POST", "/sim/faults"): _set_faults,
        ("POST", "/sim/restart"): _restart,
        ("GET", "/sim/truth"): lambda e, _: _truth(e),
        ("GET", "/sim/requests"): lambda e, _: _requests(e),
        ("GET", "/sim/stats"): lambda e, _: {
            **vars(e.app.queue.counters),
            "next_seq": e.next_seq,
            "usage": e.app.cache.usage,
        },
    }
    route = routes.get((request.method, request.path))
    if route is None:
        reply.send(404, b"{}")
        return True
    try:
        reply.send(200, msgspec.json.encode(route(engine, request)))
    except Refused as refused:
        reply.send(refused.status, refused.body)
    return True


def _set_faults(engine: Controlled, request: Request) -> object:
    try:
        return engine.set_faults(**read_object(request.body))
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from error


def _restart(engine: Controlled, request: Request) -> object:
    seq = read_object(request.body or b"{}").get("seq", "zero")
    if seq not in ("zero", "continue"):
        raise Refused(400, 'seq is "zero" or "continue"')
    engine.restart_soon(seq)
    return {"restarting": True}


def _truth(engine: Controlled) -> object:
    return [
        {"adapter": space.adapter, "salt": space.salt, "prefixes": sorted(prefixes)}
        for space, prefixes in engine.app.cache.held().items()
    ]


def _requests(engine: Controlled) -> object:
    return [
        {"method": r.method, "path": r.path, "headers": r.headers, "body": base64.b64encode(r.body).decode()}
        for r in engine.app.requests
    ]
