"""Helpers for tests: engines on ports the kernel chooses, event streams to listen to, waiting.

Nothing here sleeps for a fixed time: ``eventually`` polls a condition until a deadline.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import zmq
import zmq.asyncio

from loadtest.sim.clock import Clock
from loadtest.sim.config import SimConfig
from loadtest.sim.tokens import Tokenizer
from loadtest.sim.wire import END_SEQ
from loadtest.simengine import SimEngine

ROOT = Path(__file__).resolve().parent.parent


async def eventually(condition: Callable[[], object], deadline: float = 5.0, what: str = "") -> None:
    """Return once ``condition()`` is true; AssertionError after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what or condition}")
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], deadline: float = 5.0, what: str = "") -> None:
    """``eventually`` for callers without a loop."""
    end = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what or condition}")
        time.sleep(0.002)


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder with a path short enough for unix sockets; removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hp-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def fleet(
    count: int,
    *,
    config: SimConfig | None = None,
    tokenizer: Tokenizer | None = None,
    clock: Clock | None = None,
    events: bool = True,
) -> AsyncIterator[list[SimEngine]]:
    """``count`` engines on this loop, each with ports, ipc endpoints and block hashes of its own.
    All are stopped at the end, also those that were stopped or restarted meanwhile."""
    base = config or SimConfig()
    with socket_folder() as folder:
        engines = []
        for i in range(count):
            changes: dict[str, Any] = {"port": 0, "hash_seed": f"{base.hash_seed}/{i}"}
            if events:
                changes["events_endpoint"] = f"ipc://{folder}/events-{i}"
                changes["replay_endpoint"] = f"ipc://{folder}/replay-{i}"
            one = msgspec.structs.replace(base, **changes)
            engines.append(SimEngine(one, tokenizer=tokenizer, clock=clock))
        try:
            for engine in engines:
                await engine.start()
            yield engines
        finally:
            for engine in engines:
                await engine.stop()


class SeenBatch(NamedTuple):
    """One message of an event stream. ``events`` is None when the payload was no batch."""

    topic: bytes
    seq: int
    events: list[Any] | None
    dp_rank: int | None


class EventTap:
    """Subscribes to an engine's events and keeps what comes, in order of arrival.

    ``bind`` is for publishers that connect. Use it as an async context manager.
    """

    def __init__(self, endpoint: str, *, bind: bool = False) -> None:
        self.endpoint = endpoint
        self.batches: list[SeenBatch] = []
        self._bind = bind
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None

    @property
    def events(self) -> list[Any]:
        """All events of all well-formed batches."""
        return [event for batch in self.batches for event in batch.events or ()]

    @property
    def seqs(self) -> list[int]:
        """Sequence numbers of well-formed batches, in order of arrival."""
        return [batch.seq for batch in self.batches if batch.events is not None]

    async def __aenter__(self) -> Self:
        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.subscribe(b"")
        if self._bind:
            socket.bind(self.endpoint)
            self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            socket.connect(self.endpoint)
        self._task = asyncio.get_running_loop().create_task(self._listen(socket))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self.batches.append(_seen(await socket.recv_multipart()))


async def replay(endpoint: str, start: int, deadline: float = 5.0) -> list[SeenBatch]:
    """Ask an engine for the batches from ``start`` on; TimeoutError when the end does not come."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    batches: list[SeenBatch] = []
    try:
        async with asyncio.timeout(deadline):
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                _, *frames = await socket.recv_multipart()
                if frames[1] == END_SEQ:
                    return batches
                batches.append(_seen(frames))
    finally:
        context.destroy(linger=0)


def _seen(frames: Sequence[bytes]) -> SeenBatch:
    topic, seq, payload = frames
    try:
        _, events, rank = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError):
        return SeenBatch(topic, int.from_bytes(seq, "big"), None, None)
    well_formed = isinstance(events, list) and len(seq) == 8
    return SeenBatch(topic, int.from_bytes(seq, "big"), events if well_formed else None, rank)


class Ready(msgspec.Struct):
    """What a simulated engine's process prints when it can be used."""

    url: str
    events_endpoint: str
    replay_endpoint: str
    pid: int


class ProcessSim:
    """A simulated engine as a process of its own. Arguments are flags of ``loadtest.simengine``."""

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.simengine", *flags],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulated engine ended with status {self._process.wait()}")
        self.ready = msgspec.json.decode(line, type=Ready)
        self.url = self.ready.url

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, deadline: float = 10.0) -> int:
        """Exit status, once the process has ended."""
        return self._process.wait(deadline)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, insist after five seconds. Safe to call again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
