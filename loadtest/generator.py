"""Keep-alive load from a process of its own: so many connections, each with one request in flight.

``python -m loadtest.generator --url URL [--url URL …] --size big --stream --requests 500 --seconds 5``
prints one JSON object (``Result``). It ends after ``--requests`` or ``--seconds``, whichever is first.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from loadtest.bodies import SIZES, Bodies

_PATH = b"/v1/chat/completions"
_DRAIN_S = 30.0


class Result(msgspec.Struct):
    """What one run saw. Times in seconds; ``matched`` is the sum of ``x-hotprefix-matched-tokens``."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    elapsed: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    matched: int = 0
    first_failure: str = ""


class Plan(NamedTuple):
    """Bounds of one run."""

    connections: int
    requests: int
    seconds: float


class Generator:
    """Drives the connections. ``next_body`` makes each request's body just before it is sent."""

    def __init__(self, plan: Plan, next_body: Callable[[], bytes], api_key: str = "") -> None:
        self.plan = plan
        self.result = Result()
        self.latencies: list[float] = []
        self._next_body = next_body
        auth = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._fields = f"content-type: application/json\r\n{auth}".encode()
        self._open = 0
        self._end = 0.0
        self._over = asyncio.Event()

    async def run(self, urls: Sequence[str]) -> Result:
        """Load the addresses, connections spread evenly over them."""
        loop = asyncio.get_running_loop()
        targets = [urlsplit(url) for url in urls]
        self._end = time.monotonic() + self.plan.seconds
        begin = time.perf_counter()
        for i in range(self.plan.connections):
            target = targets[i % len(targets)]
            self._open += 1
            await loop.create_connection(
                lambda host=target.netloc: _Connection(self, host),  # type: ignore[misc]
                target.hostname or "",
                target.port or 80,
            )
        async with asyncio.timeout(self.plan.seconds + _DRAIN_S):
            await self._over.wait()
        result = self.result
        result.elapsed = time.perf_counter() - begin
        result.done = len(self.latencies)
        if self.latencies:
            ordered = sorted(self.latencies)
            result.p50 = ordered[len(ordered) // 2]
            result.p99 = ordered[len(ordered) * 99 // 100]
        return result

    def next_request(self, host: str) -> bytes | None:
        """A whole request, or None when the run is over."""
        if self.result.sent >= self.plan.requests or time.monotonic() >= self._end:
            return None
        self.result.sent += 1
        body = self._next_body()
        head = b"POST %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n"
        return head % (_PATH, host.encode(), self._fields, len(body)) + body

    def failure(self, why: str) -> None:
        self.result.failed += 1
        self.result.first_failure = self.result.first_failure or why

    def connection_over(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._over.set()


class _Connection(asyncio.Protocol):
    def __init__(self, generator: Generator, host: str) -> None:
        self._generator = generator
        self._host = host
        self._parser = httptools.HttpResponseParser(self)
        self._begin = 0.0
        self._waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting:
            self._generator.failure(f"connection lost: {exc}")
        self._generator.connection_over()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-hotprefix-matched-tokens":
            self._generator.result.matched += int(value)

    def on_message_complete(self) -> None:
        self._waiting = False
        status = self._parser.get_status_code()
        if status == 200:
            self._generator.latencies.append(time.perf_counter() - self._begin)
        else:
            self._generator.failure(f"status {status}")
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def _send(self) -> None:
        request = self._generator.next_request(self._host)
        if request is None:
            self._transport.close()
            return
        self._waiting = True
        self._begin = time.perf_counter()
        self._transport.write(request)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m loadtest.generator``."""
    import uvloop  # noqa: PLC0415 (only the process wants it)

    parser = argparse.ArgumentParser(prog="python -m loadtest.generator", description=__doc__.split("\n")[0])
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--model", default="sim")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    options = parser.parse_args(argv)
    bodies = Bodies(options.model, SIZES[options.size], options.stream, options.seed)
    plan = Plan(options.connections, options.requests, options.seconds)

    async def run() -> Result:
        return await Generator(plan, bodies.next, options.api_key).run(options.url)

    print(msgspec.json.encode(uvloop.run(run())).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
