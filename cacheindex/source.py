"""One engine's event stream: its sockets, what to believe of it, and its share of the table.

Belongs to the hub's thread. Nothing here waits: sockets are read until they have no more or this
turn's budget is spent, replays have deadlines (in ``feed``), lost connections are opened anew later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from cacheindex.actions import Action, Apply, Forget, Ignore
from cacheindex.engine_events import (
    MAX_FRAME_BYTES,
    AllCleared,
    BadFrame,
    EngineBatch,
    ReplayEnd,
    parse,
    parse_replay,
    replay_request,
)
from cacheindex.engine_state import Change, Translator
from cacheindex.events import Cleared, Stored
from cacheindex.feed import Feed
from cacheindex.keys import unpack_keys
from cacheindex.pending import Numbered
from cacheindex.table import Slot, Table
from cacheindex.trust import Trust

TURN_MESSAGES = 64
TURN_SECONDS = 0.002
_MAX_FRAMES = 5
_REPLAY_QUEUE = 16_384
_REOPEN_S = (0.1, 2.0)

Socket = zmq.Socket[bytes]


class SourceSpec(msgspec.Struct, frozen=True):
    """Where a worker's events come from.

    ``model`` is the base model, the namespace of its keys. ``endpoint`` is the ZMQ address of its
    publisher: connected to, or with ``bind`` bound, for engines that connect to us. Each worker
    needs an endpoint of its own. ``topic_prefix`` subscribes to topics that begin so; "" to all.
    """

    worker: str
    model: str
    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = False
    topic_prefix: str = ""


class SourceStatus(msgspec.Struct, frozen=True):
    """What is known of a source at the end of the hub's last turn. ``block_size`` is the engine's
    own, None before its first event; ``stride`` is what reach in its slots is rounded to.
    ``blocks`` counts its distinct blocks known now. ``skipped`` counts events, blocks and batches
    passed over, by cause. ``lag_s`` compares the engine's clock with ours at the last batch.
    Counters only grow while the source is watched."""

    trust: Trust
    reason: str = ""
    connected: bool = False
    block_size: int | None = None
    stride: int | None = None
    last_seq: int | None = None
    batches: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    epochs: int = 0
    bad_frames: int = 0
    blocks: int = 0
    skipped: dict[str, int] = {}
    lag_s: float | None = None


class Surroundings(msgspec.Struct, frozen=True):
    """What all sources of a hub share."""

    table: Table
    context: zmq.Context[Socket]
    secret: bytes
    clock: Callable[[], float]
    wall: Callable[[], float]
    queue: int


class Source:
    """``sockets_changed`` is set whenever ``sockets`` differs from before; the hub clears it."""

    def __init__(self, spec: SourceSpec, around: Surroundings) -> None:
        self.spec = spec
        self.sockets_changed = True
        self._around = around
        self._feed: Feed[EngineBatch] = Feed(replays=spec.replay_endpoint is not None)
        self._skipped: Counter[str] = Counter()
        self._translator = self._new_translator()
        self._sub: Socket | None = None
        self._monitor: Socket | None = None
        self._replay: Socket | None = None
        self._connections = 0
        self._open_at = float("-inf")
        self._opened_at = 0.0
        self._pause = _REOPEN_S[0]
        self._trouble = ""
        self._batches = self._events = self._bad_frames = 0
        self._lag: float | None = None

    # ---- for the hub ----

    @property
    def sockets(self) -> list[Socket]:
        return [socket for socket in (self._monitor, self._replay, self._sub) if socket is not None]

    def step(self, ready: Sequence[Socket], now: float) -> None:
        """Bounded work on sockets that have something, connections before what they carried."""
        if self._monitor is not None and self._monitor in ready:
            self._read_monitor(self._monitor, now)
        if self._replay is not None and self._replay in ready:
            self._read_replay(self._replay)
        if self._sub is not None and self._sub in ready:
            self._read_sub(self._sub)

    def tick(self, now: float) -> None:
        if self._sub is None and now >= self._open_at:
            self._open(now)
        self._perform(self._feed.tick(now))
        self._close_stale_replay()

    def new_epoch(self, reason: str, now: float) -> None:
        self._perform(self._feed.new_epoch(reason, now))
        self._close_stale_replay()

    def report(self, agreed: bool, now: float) -> None:
        self._perform(self._feed.outcome(agreed, now))

    def close(self) -> None:
        """Close the sockets and withdraw what the source holds."""
        self._close_sub()
        self._close_replay()
        self._around.table.forget(self.spec.worker)

    def status(self) -> SourceStatus:
        feed, translator = self._feed, self._translator
        return SourceStatus(
            trust=feed.trust,
            reason=self._trouble or feed.reason,
            connected=self._connections > 0,
            block_size=translator.block_size,
            stride=translator.stride,
            last_seq=feed.last_seq,
            batches=self._batches,
            events=self._events,
            gaps=feed.gaps,
            replays=feed.replays,
            epochs=feed.epochs,
            bad_frames=self._bad_frames,
            blocks=translator.blocks,
            skipped=dict(self._skipped),
            lag_s=self._lag,
        )

    # ---- the subscription ----

    def _open(self, now: float) -> None:
        spec, around = self.spec, self._around
        sub: Socket = around.context.socket(zmq.SUB)
        monitor: Socket | None = None
        try:
            _configure(sub, spec.endpoint, around.queue)
            sub.setsockopt(zmq.RECONNECT_IVL, 100)
            sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            sub.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # Finds a peer that left without a word.
            sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
            sub.setsockopt(zmq.SUBSCRIBE, spec.topic_prefix.encode())
            # Before connecting, so that no connection goes unseen.
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            monitor.setsockopt(zmq.LINGER, 0)
            (sub.bind if spec.bind else sub.connect)(spec.endpoint)
        except zmq.ZMQError as error:
            if monitor is not None:
                sub.disable_monitor()
                monitor.close()
            sub.close(linger=0)
            self._trouble = f"cannot {'bind' if spec.bind else 'connect'}: {error.strerror}"
            self._postpone(now)
            return
        self._trouble = ""
        self._sub, self._monitor, self._opened_at = sub, monitor, now
        self.sockets_changed = True

    def _close_sub(self) -> None:
        if self._sub is not None and self._monitor is not None:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._sub.close(linger=0)
            self._sub = self._monitor = None
            self._connections = 0
            self.sockets_changed = True

    def _postpone(self, now: float) -> None:
        """Open again soon, later each time while connections do not last."""
        short = now - self._opened_at < 1.0 or self._sub is None
        self._pause = min(2 * self._pause, _REOPEN_S[1]) if short else _REOPEN_S[0]
        self._open_at = now + self._pause

    def _read_monitor(self, monitor: Socket, now: float) -> None:
        for _ in range(TURN_MESSAGES):
            frames = _receive(monitor)
            if frames is None:
                return
            if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connections += 1
                self._perform(self._feed.on_connected(now))
            else:
                self._lost_connection(now)
                if self._sub is None:
                    return

    def _lost_connection(self, now: float) -> None:
        self._perform(self._feed.on_disconnected(now))
        self._close_stale_replay()
        if not self.spec.bind:
            # What the old connection still holds for us must not pass for the new epoch's.
            self._postpone(now)
            self._close_sub()
            return
        self._connections = max(0, self._connections - 1)
        if self._sub is not None:
            for _ in range(self._around.queue):
                if _receive(self._sub) is None:
                    break
        if self._connections:
            self._perform(self._feed.on_connected(now))

    def _read_sub(self, sub: Socket) -> None:
        clock = self._around.clock
        until = clock() + TURN_SECONDS
        for _ in range(TURN_MESSAGES):
            frames = _receive(sub)
            if frames is None:
                return
            try:
                batch = parse(frames)
            except BadFrame:
                self._bad_frames += 1
                continue
            if batch.timestamp is not None:
                self._lag = self._around.wall() - batch.timestamp
            now = clock()
            self._perform(self._feed.live(_numbered(batch), now))
            if now > until:
                return

    # ---- replays ----

    def _ask(self, from_seq: int) -> None:
        self._close_replay()
        endpoint = self.spec.replay_endpoint
        if endpoint is None:
            return
        replay: Socket = self._around.context.socket(zmq.DEALER)
        try:
            _configure(replay, endpoint, _REPLAY_QUEUE)
            replay.connect(endpoint)
            replay.send_multipart(replay_request(from_seq), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            replay.close(linger=0)
            self._skipped[f"replay_{error.strerror}"] += 1
            return  # The feed's deadline counts it as unanswered.
        self._replay = replay
        self.sockets_changed = True

    def _read_replay(self, replay: Socket) -> None:
        clock = self._around.clock
        until = clock() + TURN_SECONDS
        for _ in range(TURN_MESSAGES):
            frames = _receive(replay)
            if frames is None:
                return
            try:
                answer = parse_replay(frames)
            except BadFrame:
                self._bad_frames += 1
                continue
            now = clock()
            if isinstance(answer, EngineBatch):
                self._perform(self._feed.replayed(_numbered(answer), now))
            elif answer is ReplayEnd:
                self._perform(self._feed.replay_ended(now))
            if self._replay is not replay:
                return  # The answer led to another question.
            self._close_stale_replay()
            if self._replay is None or now > until:
                return

    def _close_stale_replay(self) -> None:
        if not self._feed.replaying:
            self._close_replay()

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None
            self.sockets_changed = True

    # ---- decisions into the table ----

    def _new_translator(self) -> Translator:
        return Translator(self.spec.model, self._around.secret, skipped=self._skipped)

    def _perform(self, actions: Sequence[Action[EngineBatch]]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self._apply(action.body)
            elif isinstance(action, Forget):
                self._translator = self._new_translator()
                self._around.table.forget(self.spec.worker)
            elif isinstance(action, Ignore):
                self._skipped[action.why.replace(" ", "_")] += 1
            else:
                self._ask(action.from_seq)

    def _apply(self, batch: EngineBatch) -> None:
        translator = self._translator
        if translator.reason:
            return
        self._batches += 1
        self._events += len(batch.events)
        for change in translator.apply(batch):
            self._change(change)
        if translator.reason:
            self._perform(self._feed.unusable(translator.reason))
            self._close_stale_replay()
        elif translator.gpu_only and any(
            isinstance(event, AllCleared) and event.tier is None for event in batch.events
        ):
            self._feed.settled()

    def _change(self, change: Change) -> None:
        event, table = change.event, self._around.table
        slot = Slot(self.spec.worker, event.tier, event.layout, change.stride, change.group)
        if isinstance(event, Stored):
            table.store(slot, unpack_keys(event.keys))
        elif isinstance(event, Cleared):
            table.clear(slot)
        else:
            table.remove(slot, unpack_keys(event.keys))


def _numbered(batch: EngineBatch) -> Numbered[EngineBatch]:
    return Numbered(batch.seq, batch, batch.digest, batch.size)


def _configure(socket: Socket, endpoint: str, queue: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, queue)
    # A message larger than any we read ends the connection, instead of filling memory.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)


def _receive(socket: Socket) -> list[bytes] | None:
    """One message, or None when there is none now. Frames beyond a few are read and dropped."""
    frames: list[bytes] = []
    with suppress(zmq.Again):
        frames.append(socket.recv(zmq.NOBLOCK))
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            if len(frames) < _MAX_FRAMES:
                frames.append(frame)
    return frames or None
