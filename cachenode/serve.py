"""Puts a node together and runs it: an owner thread with socket, store, events; the admin listener here."""

import asyncio
import logging
import os
import resource
import secrets
import signal
import threading
import time
from pathlib import Path

import psutil
from aiohttp import web

from cachenode import shared
from cachenode.admin import CALL_S, application
from cachenode.arena import Space
from cachenode.config import Node, endpoints_of, name_of, records_of, socket_of
from cachenode.directory import Directory
from cachenode.directory_view import Sizes
from cachenode.journal import Journal
from cachenode.keys_file import admin_digests
from cachenode.metrics import Status
from cachenode.publisher import Publisher
from cachenode.record import MAX_CHUNK_BLOCKS
from cachenode.server import Memory, Server
from cachenode.store import Store
from policies import eviction

STALE_S = 10.0
"""An owner thread that has not turned for so long is stuck."""

log = logging.getLogger(__name__)


class Parts:
    """A whole node. Raises OSError or ValueError, with words for the operator, where it cannot be made; its
    memory is taken then, its socket and endpoints are open."""

    def __init__(self, config: Node) -> None:
        self.name, self.boot = name_of(config), secrets.token_hex(8)
        self.path, self._started = socket_of(config), time.monotonic()
        _check_memory(config)
        sizes = Sizes.of(records_of(config), MAX_CHUNK_BLOCKS * records_of(config))
        space = Space(config.memory.bytes)
        memory, table = _memory(config, space.total_bytes, sizes.bytes)
        directory = Directory(table, sizes)
        shared.seal(memory.directory_fd, writers=False)
        shared.seal(memory.arena_fd, writers=True)
        self.journal = Journal(self.name, self.boot)
        policy = eviction.build(config.eviction, space.total_bytes)
        self.store = Store(space, directory, policy, self.journal)
        self.journal.held = self.store.held
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        events, replay = endpoints_of(config)
        self.server = Server(self.path, self.store, memory, node=self.name, boot=self.boot, ticked=self._turn)
        try:
            remote = config.events.allow_remote
            self.publisher = Publisher(self.journal, events, replay, remote=remote)
        except (OSError, ValueError):
            self.server.close()
            raise
        self.server.wake_on(self.publisher.waker)
        self.thread = threading.Thread(target=self._run, name="cachenode-owner", daemon=True)
        self.failure = ""

    def _turn(self, now: float) -> bool:
        return self.publisher.turn(now, lambda: (self.store.used_bytes, self.server.sessions.serves()))

    def _run(self) -> None:
        try:
            self.server.run()
        except Exception as error:  # The thread's root: what is wrong ends the process, and is said.
            self.failure = f"{type(error).__name__}: {error}"
            log.exception("the owner thread failed")

    # ---- for operators, from any thread ----

    def health(self) -> str:
        if self.failure or not self.thread.is_alive():
            return f"the owner thread ended: {self.failure or 'it was stopped'}"
        silent = time.monotonic() - self.server.last_turn
        return f"the owner thread has not turned for {silent:.0f} s" if silent > STALE_S else ""

    def readiness(self) -> str:
        return "" if self.server.turns and self.server.reachable() else "the control socket is not open"

    def status(self) -> Status:
        return self.server.call(self._status, CALL_S)

    def _status(self) -> Status:
        server = self.server
        sessions, quarantined = server.sessions.counts()
        return Status(
            node=self.name,
            boot=self.boot,
            socket=str(self.path),
            figures=self.store.figures(),
            sessions=sessions,
            quarantined=quarantined,
            serves=server.sessions.serves(),
            connections=server.connections(),
            turns=server.turns,
            errors=server.errors,
            requests=dict(server.sessions.counters),
            events=dict(self.publisher.counters),
            uptime_s=time.monotonic() - self._started,
        )

    def clear(self, layout: str | None) -> int:
        return self.server.call(lambda: self.store.clear(layout), CALL_S)

    def pin(self, layout: str, keys: bytes, adapter: str) -> int:
        return self.server.call(lambda: self.store.pin(layout, keys, adapter), CALL_S)

    def unpin(self, layout: str, keys: bytes, adapter: str) -> int:
        return self.server.call(lambda: self.store.unpin(layout, keys, adapter), CALL_S)

    def stop(self) -> None:
        """Ends the owner thread and closes everything; engines go on without a node."""
        self.server.stop()
        self.thread.join()
        self.server.close()
        self.publisher.close()


def _check_memory(config: Node) -> None:
    free = psutil.virtual_memory().available
    if config.memory.bytes > free:
        raise ValueError(
            f"memory.bytes is {config.memory.bytes}, but this machine has {free} bytes available: give less"
        )


def _memory(config: Node, arena_bytes: int, table_bytes: int) -> tuple[Memory, memoryview]:
    arena_fd = shared.memory_file("hotprefix-arena", arena_bytes)
    arena = shared.map_fd(arena_fd, arena_bytes, write=True, huge=config.memory.huge_pages)
    if config.memory.touch:
        shared.touch(arena)
    directory_fd = shared.memory_file("hotprefix-directory", table_bytes)
    table = shared.map_fd(directory_fd, table_bytes, write=True)
    return Memory(arena_fd, memoryview(arena), directory_fd, table_bytes), memoryview(table)


def run(config: Node) -> int:
    """Serves until SIGINT or SIGTERM; 1 where the node failed meanwhile. Raises what ``Parts`` raises."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    digests = admin_digests(Path(config.keys_file)) if config.keys_file else []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three files for each engine
    parts = Parts(config)
    parts.thread.start()
    try:
        return asyncio.run(_serve(config, parts, digests))
    finally:
        parts.stop()


async def _serve(config: Node, parts: Parts, digests: list[bytes]) -> int:
    runner = web.AppRunner(application(parts, digests), access_log=None)
    await runner.setup()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        site = web.TCPSite(runner, config.admin.host, config.admin.port)
        await site.start()
        log.info(
            "node %s (process %d) is ready: socket %s, %d bytes, admin on %s",
            parts.name,
            os.getpid(),
            parts.path,
            config.memory.bytes,
            site.name,
        )
        while not stopped.is_set():
            if not parts.thread.is_alive():
                log.error("the node ends: %s", parts.failure or "its owner thread ended")
                return 1
            try:
                await asyncio.wait_for(stopped.wait(), 1.0)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
    return 0
