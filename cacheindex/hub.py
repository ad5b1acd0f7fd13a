"""Feeds the table from the event streams of engines and nodes: one thread, no call of which blocks the
caller.

A stalled, flooded or garbled stream costs its own source trust and nobody else anything: each turn
spends a bounded time on each source. Queues on our side are bounded, and a publisher never waits for
a subscriber: what does not fit is lost, shows as a hole, and is fetched again.
"""

import ipaddress
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from cacheindex.engine_source import EngineSource, SourceSpec, SourceStatus
from cacheindex.node_source import NodeSource, NodeSpec, NodeStatus
from cacheindex.source import Socket, Surroundings
from cacheindex.table import Table

__all__ = ["Hub", "HubSnapshot", "NodeSpec", "NodeStatus", "SourceSpec", "SourceStatus"]

MIN_SECRET_BYTES = 16
MAX_REPORTS = 10_000
TICK_S = 0.1
SWEEP_STEPS = 2_000
BUSY_TURN_S = 0.002
REST_S = 0.001
"""After a busy turn the thread steps aside, so that a flood leaves the gateway's loop its turn."""

_log = logging.getLogger(__name__)

Source = EngineSource | NodeSource

_Command = Callable[[dict[str, Source], float], None]

_NOTHING: frozenset[str] = frozenset()


class HubSnapshot(msgspec.Struct, frozen=True):
    """``errors`` counts faults of our own that cut a source's turn short; it should be 0.
    ``turns`` counts rounds of the thread: where it stands still, the hub is stuck."""

    sources: dict[str, SourceStatus]
    nodes: dict[str, NodeStatus]
    turns: int
    errors: int
    reports_dropped: int


class Hub:
    """``start`` and ``close`` begin and end its one thread, the table's writer. Every other call
    returns at once, may come from any thread, and is taken at the thread's next turn, in order.

    ``secret`` (at least 16 bytes) keys the namespaces of salted prompts. ``max_queue`` bounds the
    messages that wait on our side of one source. With ``allow_remote_bind`` the hub listens on
    addresses beyond loopback, without authentication: whoever reaches them can misroute.
    """

    def __init__(
        self,
        table: Table,
        *,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_queue: int = 10_000,
        allow_remote_bind: bool = False,
    ) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the secret must have at least {MIN_SECRET_BYTES} bytes")
        self.table, self._clock = table, clock
        self._secret, self._wall, self._max_queue = secret, wall, max_queue
        self._allow_remote_bind = allow_remote_bind
        self._commands: deque[_Command] = deque()
        self._statuses: dict[str, SourceStatus] = {}
        self._nodes: dict[str, NodeStatus] = {}
        self._thread: threading.Thread | None = None
        self._running = False
        self._awake = False
        self._dropped = True
        self._turns = self._errors = self._reports_dropped = 0
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    def start(self) -> None:
        """May be called once."""
        if self._thread is not None:
            raise RuntimeError("a hub is started once")
        self._running = True
        self._thread = threading.Thread(target=self._run, name="cacheindex-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes every socket; waits for at most two seconds. What the sources
        held is forgotten. Calling it again does nothing."""
        self._running = False
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        if self._thread is None or not self._thread.is_alive():
            self._ear.close()
            self._mouth.close()

    def watch(self, spec: SourceSpec) -> None:
        """Follow this source; a worker watched already is replaced when its spec differs.

        Raises ValueError for an endpoint that is no ipc or tcp address, for a tcp address beyond
        loopback that would be bound without ``allow_remote_bind``, and for the name of a node."""
        _check_endpoint(spec.endpoint, bind=spec.bind, remote=self._allow_remote_bind)
        if spec.replay_endpoint is not None:
            _check_endpoint(spec.replay_endpoint, bind=False, remote=True)
        if spec.worker in self._nodes:
            raise ValueError(f"{spec.worker!r} is the name of a node")
        self._statuses.setdefault(spec.worker, SourceStatus(trust="syncing", reason="not connected"))
        self._begin(spec.worker, spec, lambda around: EngineSource(spec, around))

    def watch_node(self, spec: NodeSpec) -> None:
        """Follow this node, as ``watch`` does a worker. Raises ValueError for an endpoint that cannot
        be connected to and for the name of a worker."""
        for endpoint in (spec.endpoint, spec.replay_endpoint):
            _check_endpoint(endpoint, bind=False, remote=True)
        if spec.name in self._statuses:
            raise ValueError(f"{spec.name!r} is the name of a worker")
        self._nodes.setdefault(spec.name, NodeStatus(trust="syncing", reason="not connected"))
        self._begin(spec.name, spec, lambda around: NodeSource(spec, around))

    def _begin(self, name: str, spec: SourceSpec | NodeSpec, make: Callable[[Surroundings], Source]) -> None:
        def begin(sources: dict[str, Source], now: float) -> None:
            known = sources.get(name)
            if known is not None and known.spec == spec:
                return
            if known is not None:
                known.close()
            sources[name] = make(self._around)

        self._command(begin)

    def unwatch(self, name: str) -> None:
        """Forget the worker or node and what it holds."""

        def end(sources: dict[str, Source], now: float) -> None:
            known = sources.pop(name, None)
            if known is not None:
                known.close()
                self._dropped = True
            self._statuses.pop(name, None)
            self._nodes.pop(name, None)

        self._command(end)

    def new_epoch(self, worker: str, reason: str) -> None:
        """The worker's process may be another one (its health flapped, its start time changed):
        all it said before is forgotten, and asked for again where that is possible."""

        def begin(sources: dict[str, Source], now: float) -> None:
            if worker in sources:
                sources[worker].new_epoch(reason, now)

        self._command(begin)

    def report(self, worker: str, agreed: bool) -> None:
        """How a prediction that nothing else explains compared with the engine's answer. Under
        pressure reports are dropped, and counted."""
        if len(self._commands) >= MAX_REPORTS:
            self._reports_dropped += 1
            return

        def take(sources: dict[str, Source], now: float) -> None:
            if worker in sources:
                sources[worker].report(agreed, now)

        self._command(take)

    def status(self, worker: str) -> SourceStatus | None:
        """None for a worker that is not watched."""
        return self._statuses.get(worker)

    def node(self, name: str) -> NodeStatus | None:
        """None for a node that is not watched."""
        return self._nodes.get(name)

    def serves(self, node: str, worker: str) -> frozenset[str]:
        """The layouts in which this node works for this worker, by its last heartbeat; none where it
        does not, or cannot be believed now."""
        status = self._nodes.get(node)
        if status is None or status.trust not in ("exact", "syncing"):
            return _NOTHING
        return status.serves.get(worker, _NOTHING)

    def snapshot(self) -> HubSnapshot:
        """The status of all sources, for metrics."""
        return HubSnapshot(
            sources=dict(self._statuses),
            nodes=dict(self._nodes),
            turns=self._turns,
            errors=self._errors,
            reports_dropped=self._reports_dropped,
        )

    # ---- the thread ----

    def _command(self, command: _Command) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            with suppress(OSError):  # Full: it will wake anyway. Closed: there is nobody to wake.
                self._mouth.send(b"\0")

    def _run(self) -> None:
        context: zmq.Context[Socket] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 8192)
        self._around = Surroundings(
            table=self.table,
            context=context,
            secret=self._secret,
            clock=self._clock,
            wall=self._wall,
            queue=self._max_queue,
        )
        sources: dict[str, Source] = {}
        self._poller = zmq.Poller()
        while self._running:
            try:
                self._turn(sources)
            except Exception as error:  # The thread's root: one fault must not end all feeds.
                # Its name only: a message may quote what an engine said.
                self._errors += 1
                self._dropped = True
                _log.error("hub: a turn failed with %s", type(error).__name__)
                time.sleep(TICK_S)
        for source in sources.values():
            source.close()
        self._statuses.clear()
        self._nodes.clear()
        context.destroy(linger=0)

    def _turn(self, sources: dict[str, Source]) -> None:
        more = self.table.sweep(SWEEP_STEPS)
        self._listen(sources)
        busy = more or self._commands or any(source.busy for source in sources.values())
        timeout = 0.0 if busy else TICK_S
        ready = {ready for ready, _ in self._poller.poll(int(timeout * 1000))}
        self._awake = False
        with suppress(BlockingIOError):
            self._ear.recv(4096)
        now = self._clock()
        for _ in range(len(self._commands)):
            self._commands.popleft()(sources, now)
        for name in _rotated(list(sources), self._turns):
            source = sources[name]
            try:
                source.step([sock for sock in source.line.sockets if sock in ready], now)
                source.tick(self._clock())
            except (AssertionError, LookupError, TypeError, ValueError, zmq.ZMQError) as error:
                # A fault of ours in one source: it begins anew, the others go on.
                self._errors += 1
                _log.error("hub: source %s failed with %s", name, type(error).__name__)
                source.new_epoch("internal error", now)
            if isinstance(source, NodeSource):
                self._nodes[name] = source.status()
            else:
                self._statuses[name] = source.status()
        self._turns += 1
        if self._clock() - now > BUSY_TURN_S:
            time.sleep(REST_S)

    def _listen(self, sources: dict[str, Source]) -> None:
        """Poll exactly the sockets there are now."""
        if not self._dropped and not any(source.line.sockets_changed for source in sources.values()):
            return
        self._dropped = False
        self._poller = zmq.Poller()
        self._poller.register(self._ear.fileno(), zmq.POLLIN)
        for source in sources.values():
            source.line.sockets_changed = False
            for sock in source.line.sockets:
                self._poller.register(sock, zmq.POLLIN)


def _rotated(names: list[str], turn: int) -> list[str]:
    start = turn % len(names) if names else 0
    return names[start:] + names[:start]


def _check_endpoint(endpoint: str, *, bind: bool, remote: bool) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdigit()):
        raise ValueError(f"{endpoint!r} is no ipc:// or tcp://host:port address")
    if not bind and (host == "*" or port == "*"):
        raise ValueError(f"{endpoint!r} cannot be connected to: name the engine's host and port")
    if bind and not remote and not _is_loopback(host.strip("[]")):
        raise ValueError(f"{endpoint!r} would listen beyond this machine without authentication")


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
