"""A small HTTP/1.1 server on a bare asyncio protocol: little CPU per request, and every fault a
test wants (cut connections, silence) within reach. For loopback tests only, not for the internet."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools

_BODY_LIMIT = 64 * 1024 * 1024


class Request(NamedTuple):
    """One request as it came: header names in their original case, body bytes untouched."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a header, by name in any case."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), None)


Handler = Callable[[Request, "Reply"], Awaitable[None]]
Fast = Callable[[Request], list[bytes] | None]


def head(status: int, fields: str) -> bytes:
    """A response head; ``fields`` are complete lines ending in CRLF."""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fields}\r\n".encode()


class Reply:
    """The answer to one request. After ``cut`` or a client's departure writes do nothing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.started = False
        self.finished = False

    def send(self, status: int, body: bytes, kind: str = "application/json", extra: str = "") -> None:
        """A whole answer."""
        self.started = self.finished = True
        fields = f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n{extra}"
        self._write(head(status, fields) + body)

    def start_stream(self, extra: str = "") -> None:
        self.started = True
        fields = f"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n{extra}"
        self._write(head(200, fields))

    def chunk(self, data: bytes) -> None:
        """One chunk, one write."""
        self._write(chunked(data))

    def end_stream(self) -> None:
        self.finished = True
        self._write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close without ending the answer (RST: nothing more can be read)."""
        self.finished = True
        self._transport.abort()

    def hang_up(self) -> None:
        """Close after what was written has gone out, without ending the answer."""
        self.finished = True
        self._transport.close()

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


def chunked(data: bytes) -> bytes:
    """One chunk in chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests are handled one after the other, in order.

    ``fast`` may answer without a task. When the client leaves, a handler still running is
    cancelled: an engine aborts what nobody waits for.
    """

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._url = b""
        self._headers: list[tuple[str, str]] = []
        self._body: list[bytes] = []
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    # -- httptools callbacks --------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > _BODY_LIMIT:
            self.transport.close()
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("ascii")
        path = self._url.partition(b"?")[0].decode("latin-1")
        request = Request(method, path, self._headers, b"".join(self._body))
        self._url, self._headers, self._body, self._size = b"", [], [], 0
        if self._task is not None:
            self._waiting.append(request)
        else:
            self._handle(request)

    def _handle(self, request: Request) -> None:
        if self._server.fast is not None:
            pieces = self._server.fast(request)
            if pieces is not None:
                for piece in pieces:
                    self.transport.write(piece)
                return
        self._task = asyncio.get_running_loop().create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        reply = Reply(self.transport)
        try:
            await self._server.handler(request, reply)
        except Exception as error:  # the task's root
            self._server.errors += 1
            self._server.last_error = error
            if reply.started:
                reply.cut()
            else:
                reply.send(500, b'{"error":{"message":"simulated engine bug","type":"InternalServerError"}}')
        finally:
            self._task = None
        if self._waiting and not self.transport.is_closing():
            self._handle(self._waiting.popleft())


class Server:
    """Listens on loopback. ``errors`` counts handlers that raised: zero unless the simulation is wrong."""

    def __init__(self, handler: Handler, fast: Fast | None = None) -> None:
        self.handler = handler
        self.fast = fast
        self.connections: set[Connection] = set()
        self.errors = 0
        self.last_error: Exception | None = None
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port, which the kernel chose when 0 was given."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=512)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut every connection, as the death of the process would."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [c._task for c in self.connections if c._task is not None]
        for connection in list(self.connections):
            connection.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
