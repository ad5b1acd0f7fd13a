"""A simulated inference engine: vLLM's API, cache habits and KV events, without a model.

In a test::

    async with SimEngine(SimConfig(block_size=16, events_endpoint="ipc:///tmp/x/ev")) as engine:
        ... engine.url, engine.app.cache.held(), engine.set_faults(die_after=3) ...

As a process: ``python -m loadtest.simengine --port 8001 --model-path DIR`` (each field of
``SimConfig`` is a flag). It prints one JSON line with its addresses when it is ready.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import msgspec

from loadtest.sim import control
from loadtest.sim.app import App
from loadtest.sim.cache import BlockCache
from loadtest.sim.clock import Clock, RealClock
from loadtest.sim.config import Faults, RestartSeq, SimConfig
from loadtest.sim.fast import canned
from loadtest.sim.faults import FaultBox
from loadtest.sim.http import Reply, Request, Server
from loadtest.sim.publisher import Publisher
from loadtest.sim.queue import Queue
from loadtest.sim.tokens import ByteTokenizer, FolderTokenizer, Tokenizer
from loadtest.sim.wire import EventEncoder

T = TypeVar("T")


class SimEngine:
    """One engine on the running event loop. Use it from that loop only (``ThreadedSim`` for others).

    ``app`` is its present life: ``app.cache`` (the truth), ``app.requests`` (what was asked),
    ``app.queue.counters``. A restart replaces it; ports, endpoints and faults stay.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config or SimConfig()
        self.faults = FaultBox()
        self.clock = clock or RealClock()
        self.alive = False
        self._tokenizer = tokenizer or _tokenizer(self.config)
        self._port = self.config.port
        self._publisher: Publisher | None = None
        self._server: Server | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self.app = self._new_life()

    @property
    def url(self) -> str:
        """Base URL without a path."""
        return f"http://{self.config.host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def events_endpoint(self) -> str:
        """Where to subscribe (or, for a connecting publisher, where the listener binds)."""
        return self._publisher.endpoint if self._publisher else ""

    @property
    def replay_endpoint(self) -> str:
        return self._publisher.replay_endpoint if self._publisher else ""

    @property
    def subscribers(self) -> int:
        """Subscriptions to the event stream now: await one before relying on live events."""
        return self._publisher.subscribers if self._publisher else 0

    @property
    def replays(self) -> int:
        """Replay requests answered so far."""
        return self._publisher.replays if self._publisher else 0

    @property
    def next_seq(self) -> int:
        """The number the next batch of events will have."""
        return self._publisher.next_seq if self._publisher else 0

    @property
    def errors(self) -> int:
        """Bugs of the simulation met while answering; tests hold it at zero."""
        return self._server.errors if self._server else 0

    async def start(self) -> Self:
        """Listen and publish. Returns when requests are answered."""
        if self.config.events_endpoint and self._publisher is None:
            self._publisher = self._new_publisher()
        if self._publisher is not None:
            await self._publisher.open()
        self._server = Server(self._handle, canned(self.config) if self.config.fast else None)
        self._port = await self._server.open(self.config.host, self._port)
        self.alive = True
        self._chore(self._watch_exit(self.app))
        return self

    async def stop(self) -> None:
        """Cut all connections and close all sockets, as death does. May be started again."""
        self.alive = False
        current = asyncio.current_task()
        for chore in [chore for chore in self._chores if chore is not current]:
            chore.cancel()
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._publisher is not None:
            await self._publisher.close()

    async def restart(self, seq: RestartSeq = "zero") -> None:
        """Die and come back on the same addresses: empty cache, new start time, no replay buffer.
        Event numbers begin at 0 or happen to go on (``continue``). Faults stay as they are."""
        await self.stop()
        if self._publisher is not None and seq == "zero":
            self._publisher.next_seq = 0
        self.app = self._new_life()
        await self.start()

    def restart_soon(self, seq: RestartSeq) -> None:
        """``restart`` in the background."""
        self._chore(self.restart(seq))

    def set_faults(self, **changes: object) -> Faults:
        """Change switches (see ``Faults``), keep the others. Raises msgspec.ValidationError."""
        now = self.faults.set(changes)
        if self._publisher is not None:
            self._publisher.faults_changed()
        return now

    def clear_faults(self) -> None:
        """Health again."""
        self.set_faults(**msgspec.structs.asdict(Faults()))

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def _handle(self, request: Request, reply: Reply) -> None:
        if not control.handle(self, request, reply):
            await self.app.handle(request, reply)

    def _new_life(self) -> App:
        config = self.config
        cache = BlockCache(config.num_blocks, config.block_size, config.hash_seed)

        def publish() -> None:
            events = cache.take_events()
            if self._publisher is not None:
                self._publisher.publish(events)

        queue = Queue(
            cache,
            self.clock,
            publish,
            max_num_seqs=config.max_num_seqs,
            prefill_rate=config.prefill_rate,
            decode_rate=config.decode_rate,
        )
        return App(
            config=config,
            tokenizer=self._tokenizer,
            clock=self.clock,
            faults=self.faults,
            cache=cache,
            queue=queue,
            started=time.time(),
        )

    def _new_publisher(self) -> Publisher:
        config = self.config
        adapters = {name: i for i, name in enumerate(config.adapters, 1)}
        encoder = EventEncoder(config.block_size, config.encoding, config.hash_form, adapters, config.dp_rank)
        return Publisher(config, encoder=encoder, faults=self.faults, clock=self.clock)

    def _chore(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _watch_exit(self, app: App) -> None:
        await app.exit_now.wait()
        await self.stop()


class ThreadedSim:
    """A ``SimEngine`` on a thread and loop of its own, for callers without a loop."""

    def __init__(self, config: SimConfig | None = None, *, tokenizer: Tokenizer | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sim-engine", daemon=True)
        self._thread.start()
        self.engine = self.call(lambda: SimEngine(config, tokenizer=tokenizer))
        self.run(self.engine.start())

    @property
    def url(self) -> str:
        return self.engine.url

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        """Run a coroutine on the engine's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the engine's loop: the way to read its state from outside."""

        async def once() -> T:
            return function()

        return self.run(once())

    def stop(self) -> None:
        """Stop the engine, its loop and its thread."""
        self.run(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _tokenizer(config: SimConfig) -> Tokenizer:
    if config.model_path and not config.fast:
        return FolderTokenizer(config.model_path)
    return ByteTokenizer()


def parse_config(argv: Sequence[str]) -> SimConfig:
    """Flags to a ``SimConfig``: each field is a flag; ``--adapter NAME=PATH`` may be repeated."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.simengine", description=__doc__.split("\n")[0])
    for field in msgspec.structs.fields(SimConfig):
        name = "--" + field.name.replace("_", "-")
        if field.name == "adapters":
            parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH")
        elif field.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(name, default=field.default)
    values = vars(parser.parse_args(argv))
    values["adapters"] = dict(pair.partition("=")[::2] for pair in values.pop("adapter"))
    try:
        return msgspec.convert(values, SimConfig, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))


async def serve(config: SimConfig) -> int:
    """Run until SIGINT or SIGTERM (0) or until a fault kills the engine (1)."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with SimEngine(config) as engine:
        ready = {
            "url": engine.url,
            "events_endpoint": engine.events_endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "pid": os.getpid(),
        }
        print(msgspec.json.encode(ready).decode(), flush=True)
        waiting = {loop.create_task(stopped.wait()), loop.create_task(_died(engine))}
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return 0 if stopped.is_set() or not done else 1


async def _died(engine: SimEngine) -> None:
    while True:
        life = engine.app
        await life.exit_now.wait()
        if engine.app is life:
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m loadtest.simengine``."""
    import uvloop  # noqa: PLC0415 (only the process wants it)

    config = parse_config(sys.argv[1:] if argv is None else argv)
    # uvloop gathers the writes of a turn into one; the fast mode's chunks must be writes of their own.
    return asyncio.run(serve(config)) if config.fast else uvloop.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
