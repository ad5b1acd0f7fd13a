"""The edge of the HTTP server: a protocol that gives up on heads that never end, and a guard that
refuses what no well-meant client sends, in OpenAI's error form."""

import asyncio
import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import config
from gateway.openai import ApiError
from gateway.tenants import Tenants

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = "hotprefix.request_id"
TENANT = "hotprefix.tenant"
HEADERS = "hotprefix.headers"
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
REQUEST_IDS = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""What a client may name its request. Engines take meaning out of richer ids (addresses of peers)."""

DRAINED = 1 << 20
UNREAD = (408, 413)
"""Errors after which the rest of a request's body may still be on its way."""


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the time and bytes a request's head may take."""

    def __init__(self, *args: Any, limits: config.Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None and not self._running.response_complete:
            # The server tells only the newest of pipelined requests that the client is gone.
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._stop_timer()
        self._stop_patience()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and not self._busy:
            self._start_timer()
        if self._timer is not None:
            self._head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._timer is not None and self._head_bytes > self._limits.header_bytes:
            self._refuse(ApiError(431, f"More than {self._limits.header_bytes} bytes of headers."))

    def pause_writing(self) -> None:
        """The client takes nothing: after ``write_s`` its connection is cut."""
        super().pause_writing()
        if self._patience is None:
            self._patience = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_patience()
        super().resume_writing()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    @property
    def _busy(self) -> bool:
        """A request has been read up to its body and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _start_timer(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(self._limits.head_s, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self._head_bytes:
            self._refuse(ApiError(408, f"The request's head took longer than {self._limits.head_s:g} s."))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        self._stop_timer()
        if self._busy:  # an answer is under way on this connection: nothing may be written into it
            self.transport.close()
            return
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head whose ``Upgrade`` header has another name: nothing is upgraded here, and the parser would
    leave the body of such a request unread (Java's client sends one with every cleartext request)."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if b"upgrade" not in head.lower():
        return data
    return UPGRADE.sub(b"\r\nx-unused:", head) + data[len(head) :]


class Guard:
    """Stands before every route: checks the head, names the request, and asks for a key on every
    path that is not in ``open_paths``; with ``admin`` only an admin's key will do."""

    def __init__(
        self, app: App, tenants: Tenants, limits: config.Limits, *, open_paths: frozenset[str], admin: bool
    ) -> None:
        self._app, self._tenants, self._limits = app, tenants, limits
        self._open_paths, self._admin = open_paths, admin
        self._life, self._numbers = secrets.token_hex(10), itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        scope[HEADERS] = headers
        try:
            self._check(scope, headers)
        except ApiError as error:
            await send_error(send, error, scope.get(REQUEST_ID, ""))
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        scope[REQUEST_ID] = f"{self._life}{next(self._numbers):012x}"
        size = sum(len(name) + len(value) for name, value in raw)
        if size > self._limits.header_bytes or len(raw) > self._limits.headers:
            raise ApiError(
                431, f"At most {self._limits.headers} headers of {self._limits.header_bytes} bytes in all."
            )
        for name, value in raw:
            headers[name.decode("latin-1")] = value.decode("latin-1")
        names = [name for name, _ in raw]
        if names.count(b"host") != 1 or names.count(b"authorization") > 1:
            raise ApiError(400, "A request needs one Host header and at most one Authorization header.")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise ApiError(400, "No transfer encoding but `chunked` is read here.")
        given = headers.get("x-request-id", "")
        if REQUEST_IDS.fullmatch(given):
            scope[REQUEST_ID] = given
        else:
            headers["x-request-id"] = scope[REQUEST_ID]
        if scope["path"] in self._open_paths:
            return
        tenant = self._tenants.who(headers.get("authorization"))
        if tenant is None:
            raise ApiError(
                401,
                "This server wants `Authorization: Bearer KEY` with a key it knows.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if self._admin and not tenant.admin:
            raise not_admin()
        scope[TENANT] = tenant


def not_admin() -> ApiError:
    """The error for a key that is good, but not good enough."""
    return ApiError(403, "This needs an admin's key.", kind="permission_error", code="not_admin")


async def send_error(send: Send, error: ApiError, request_id: str) -> None:
    """Answer with an error in OpenAI's form."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode("latin-1", "replace")),
    ]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in UNREAD:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive, limits: config.Limits) -> bytes:
    """The whole request body. Raises ApiError: 413 too large, 408 too slow, 400 broken off.

    Of a body that is too large as much again (``DRAINED`` bytes at least) is read and thrown away,
    since a client that is still sending would not see the answer.
    """
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(limits.body_s):
            while more and size <= limits.body_bytes + max(limits.body_bytes, DRAINED):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The client left before its body was complete.")
                part = message.get("body", b"")
                size += len(part)
                if size <= limits.body_bytes:
                    parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise ApiError(408, f"The body took longer than {limits.body_s:g} s to arrive.") from error
    if size > limits.body_bytes:
        raise ApiError(
            413,
            f"A body may have {limits.body_bytes} bytes here (`limits.body_bytes`).",
            code="body_too_large",
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)
