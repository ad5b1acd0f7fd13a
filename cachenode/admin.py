"""The operators' listener: is it alive, what does it hold, and the few things that may be asked of it.

Reads by GET change nothing; what changes something is a POST. Nothing shows prompts, environment or memory.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web

from cachenode.keys_file import admitted
from cachenode.metrics import Status, exposition

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_KEYS = 100_000
CALL_S = 5.0
OPEN = ("/health", "/ready")
"""Answered without a key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control(Protocol):
    """The node as operators may use it. All but ``health`` are answered by the owner thread: they may take a
    while, and raise TimeoutError where it does not come to it."""

    def health(self) -> str:
        """ "" while it lives, else what is wrong; asks nobody."""
        ...

    def readiness(self) -> str: ...
    def status(self) -> Status: ...
    def clear(self, layout: str | None) -> int: ...
    def pin(self, layout: str, keys: bytes, adapter: str) -> int: ...
    def unpin(self, layout: str, keys: bytes, adapter: str) -> int: ...


class ClearAsk(msgspec.Struct, forbid_unknown_fields=True):
    """``layout``: a fingerprint; without one, everything."""

    layout: str | None = None


class PinAsk(msgspec.Struct, forbid_unknown_fields=True):
    """``keys``: the keys of a prompt's engine blocks from its start on, 32 hex digits each."""

    layout: str
    keys: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]
    adapter: str = ""

    def packed(self) -> bytes:
        """Raises ValueError for what are no keys."""
        if any(len(key) != 32 for key in self.keys):
            raise ValueError("a key has 32 hex digits")
        return bytes.fromhex("".join(self.keys))


def application(control: Control, digests: list[bytes]) -> web.Application:
    """``digests``: of the keys that open it; none: open to whoever reaches it."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guard(digests)])
    routes = _Routes(control)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/ready", routes.ready),
            web.get("/metrics", routes.metrics),
            web.get("/v1/status", routes.status),
            web.post("/v1/clear", routes.clear),
            web.post("/v1/pin", routes.pin),
            web.post("/v1/unpin", routes.unpin),
        ]
    )
    return app


def _guard(digests: list[bytes]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and request.path not in OPEN:
            given = request.headers.get("authorization", "")
            if not admitted(given, digests):
                return _failed(401, "an admin's API key is needed: Authorization: Bearer KEY")
        if request.method == "POST" and request.content_type != "application/json":
            # A page in a browser can send other types here without being asked.
            return _failed(415, "send content-type: application/json")
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return _failed(405, f"{request.path} takes {allowed}", {"allow": allowed})
        except web.HTTPNotFound:
            return _failed(404, f"there is no {request.path[:200]}")
        except web.HTTPRequestEntityTooLarge:
            return _failed(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        except TimeoutError:
            return _failed(503, "the node is too busy to answer; try again")

    return guard


class _Routes:
    def __init__(self, control: Control) -> None:
        self._control = control

    async def health(self, _request: web.Request) -> web.Response:
        return _well(self._control.health())

    async def ready(self, _request: web.Request) -> web.Response:
        return _well(self._control.health() or self._control.readiness())

    async def metrics(self, _request: web.Request) -> web.Response:
        status = await asyncio.to_thread(self._control.status)
        return web.Response(body=exposition(status), headers={"content-type": "text/plain; version=0.0.4"})

    async def status(self, _request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._control.status))

    async def clear(self, request: web.Request) -> web.Response:
        try:
            ask = msgspec.json.decode(await request.read() or b"{}", type=ClearAsk)
        except msgspec.DecodeError as error:
            return _failed(400, f"the body: {error}")
        return _json({"records": await asyncio.to_thread(self._control.clear, ask.layout)})

    async def pin(self, request: web.Request) -> web.Response:
        return await self._pinned(request, self._control.pin)

    async def unpin(self, request: web.Request) -> web.Response:
        return await self._pinned(request, self._control.unpin)

    async def _pinned(self, request: web.Request, call: Callable[[str, bytes, str], int]) -> web.Response:
        try:
            ask = msgspec.json.decode(await request.read(), type=PinAsk)
            keys = ask.packed()
        except (msgspec.DecodeError, ValueError) as error:
            return _failed(400, f"the body: {error}")
        return _json({"blocks": await asyncio.to_thread(call, ask.layout, keys, ask.adapter)})


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _failed(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json({"error": {"message": message}}, status, headers)


def _well(wrong: str) -> web.Response:
    return _json({"status": wrong or "ok"}, 503 if wrong else 200)
