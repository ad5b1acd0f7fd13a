"""The connection to engines: one pooled client, requests rebuilt rather than forwarded."""

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping
from typing import Self

import aiohttp

from gateway import config
from gateway.workers import Worker

FORWARDED = ("accept", "content-type", "traceparent", "tracestate", "x-request-id")
"""The client's headers that reach an engine. Its credentials never do."""

ANSWERED = ("content-type", "retry-after")
"""The engine's headers that reach the client."""


KEEP_ALIVE_S = 4.0
"""Engines on uvicorn close idle connections after 5 s; ours are given up before."""


class UpstreamFailed(Exception):
    """The engine did not answer, or broke off. ``reason`` is one word, the message is for the log.
    ``refused``: nothing listens there any more. ``again``: another engine may be tried; not after a
    time-out, since the work may still be going on."""

    def __init__(self, reason: str, message: str, *, refused: bool = False, again: bool = True) -> None:
        super().__init__(message)
        self.reason, self.refused, self.again = reason, refused, again


class Answer:
    """An engine's answer, its head read. ``async with`` closes it; closing it early aborts the
    request at the engine."""

    def __init__(self, response: aiohttp.ClientResponse, timeouts: config.Upstream) -> None:
        self._response, self._timeouts = response, timeouts
        self.status = response.status
        self.headers: Mapping[str, str] = {
            name: response.headers[name] for name in ANSWERED if name in response.headers
        }

    @property
    def streaming(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._response.close() if not self._response.content.at_eof() else self._response.release()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamFailed when it breaks off or falls silent."""
        wait = self._timeouts.first_byte_s
        content = self._response.content
        try:
            while True:
                async with asyncio.timeout(wait):
                    chunk = await content.readany()
                if not chunk:
                    return
                yield chunk
                wait = self._timeouts.idle_s
        except TimeoutError as error:
            raise UpstreamFailed("timeout", f"it sent nothing for {wait:g} s", again=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed("broken", f"it broke off its answer: {error}") from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])


class Upstream:
    """Opens requests at workers. ``close`` ends the pool."""

    def __init__(self, timeouts: config.Upstream) -> None:
        self._timeouts = timeouts
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )

    async def close(self) -> None:
        await self._session.close()

    async def open(self, worker: Worker, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request and read the answer's head. Raises UpstreamFailed."""
        sent = {name: headers[name] for name in FORWARDED if name in headers}
        sent["Accept-Encoding"] = "identity"
        if worker.spec.api_key:
            sent["Authorization"] = f"Bearer {worker.spec.api_key}"
        if worker.spec.rank is not None:
            sent["X-data-parallel-rank"] = str(worker.spec.rank)
        try:
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await self._session.post(
                    worker.spec.url.rstrip("/") + path, data=body, headers=sent, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamFailed("connect", "it did not accept a connection in time") from error
        except TimeoutError as error:
            raise UpstreamFailed("timeout", "it did not answer in time", again=False) from error
        except aiohttp.ClientConnectorError as error:
            refused = error.os_error.errno == errno.ECONNREFUSED
            raise UpstreamFailed("connect", f"no connection: {error}", refused=refused) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed("broken", f"it closed the connection: {error}") from error
        return Answer(response, self._timeouts)
