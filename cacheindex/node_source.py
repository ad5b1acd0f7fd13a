"""One cache node's event stream: what to believe of it, and its share of the table.

The wire: ``[topic, batch]`` is published, the topic being the node's name; questions go out as
``[b"", request]``, answers come as ``[b"", batch]``, after the last one ``[b"", b""]``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from cacheindex.actions import Apply, Forget, Ignore, Resync
from cacheindex.events import (
    MAX_BATCH_BYTES,
    BadEvent,
    Batch,
    Heartbeat,
    Replay,
    Request,
    Snapshot,
    Tier,
    decode_batch,
    encode,
)
from cacheindex.node_feed import NodeAction, NodeFeed
from cacheindex.node_state import NodeState
from cacheindex.pending import Numbered
from cacheindex.source import TURN_SECONDS, Address, Line, Socket, Surroundings
from cacheindex.trust import Trust

STEP_KEYS = 1024
"""Keys that enter the table between two looks at the clock."""

RECOUNT_S = 1.0


class NodeSpec(msgspec.Struct, frozen=True):
    """Where a node's events come from. ``name`` is its own name for itself, and the holder of its keys:
    no worker may have the same. ``replay_endpoint`` answers questions."""

    name: str
    endpoint: str
    replay_endpoint: str


class NodeStatus(msgspec.Struct, frozen=True):
    """What is known of a node at the end of the hub's last turn. ``serves``: the layouts of each worker
    it works for, by its last heartbeat; ``fill`` and ``rates`` are bytes used and bytes per second, by
    tier. ``keys`` counts what the index has of it, each second. ``skipped`` counts events and batches
    passed over, by cause. Counters only grow while the node is watched."""

    trust: Trust
    reason: str = ""
    connected: bool = False
    epoch: str | None = None
    last_seq: int | None = None
    keys: int = 0
    fill: dict[Tier, int] = {}
    rates: dict[Tier, float] = {}
    serves: Mapping[str, frozenset[str]] = {}
    batches: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    snapshots: int = 0
    epochs: int = 0
    bad_frames: int = 0
    skipped: dict[str, int] = {}


class NodeSource:
    """For the hub's thread; the ``Listener`` of its own line. ``busy``: there is more to do without any
    message."""

    def __init__(self, spec: NodeSpec, around: Surroundings) -> None:
        self.spec = spec
        address = Address(spec.endpoint, spec.replay_endpoint, False, spec.name, MAX_BATCH_BYTES)
        self.line = Line(address, around, self)
        self._around = around
        self._feed: NodeFeed[Batch] = NodeFeed()
        self._skipped: Counter[str] = Counter()
        self._state = NodeState(spec.name, self._skipped)
        self._batches = self._events = self._bad_frames = 0
        self._reading = True
        self._recount_at = float("-inf")

    # ---- for the hub ----

    @property
    def busy(self) -> bool:
        return self._state.busy

    def step(self, ready: Sequence[Socket], now: float) -> None:
        """What was read before enters the table before more is read: so little waits on our side."""
        self._reading = not self._state.busy
        self.line.step(ready, now, reading=self._reading)
        until = self._around.clock() + TURN_SECONDS
        while self._state.work(self._around.table, STEP_KEYS) and self._around.clock() < until:
            pass

    def tick(self, now: float) -> None:
        self.line.tick(now)
        if self._reading:  # What waits for us is not late.
            self._perform(self._feed.tick(now))
        if now >= self._recount_at:
            self._recount_at = now + RECOUNT_S
            self._state.recount(self._around.table)

    def new_epoch(self, reason: str, now: float) -> None:
        self._perform(self._feed.new_epoch(reason, now))

    def report(self, agreed: bool, now: float) -> None:
        """Says nothing of a node: a load may fail for reasons of the worker's own."""

    def close(self) -> None:
        """Close the sockets and withdraw what the node holds."""
        self.line.close()
        self._state.forget(self._around.table)

    def status(self) -> NodeStatus:
        feed, state, facts = self._feed, self._state, self._state.facts
        entering = feed.trust == "exact" and state.busy
        unasked = {f"question_{why}": count for why, count in self.line.unasked.items()}
        return NodeStatus(
            trust="syncing" if entering else feed.trust,
            reason=self.line.trouble or ("entering the index" if entering else feed.reason),
            connected=self.line.connected,
            epoch=feed.epoch,
            last_seq=feed.last_seq,
            keys=state.keys,
            fill=facts.fill,
            rates=facts.rates,
            serves=facts.serves,
            batches=self._batches,
            events=self._events,
            gaps=feed.gaps,
            replays=feed.replays,
            snapshots=feed.refills,
            epochs=feed.epochs,
            bad_frames=self._bad_frames,
            skipped={**self._skipped, **unasked},
        )

    # ---- for the line ----

    def connected(self, now: float) -> None:
        self._perform(self._feed.on_connected(now))

    def lost(self, now: float) -> None:
        self._state.silence()
        self._perform(self._feed.on_disconnected(now))

    def heard(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 2 or frames[0] != self.spec.name.encode():
            self._skipped["other_topic"] += 1
            return
        batch = self._read(frames[1])
        if batch is None:
            return
        life = self._feed.epoch
        self._perform(self._feed.live(_numbered(batch, frames[1]), batch.epoch, now))
        if self._feed.epoch != life:
            self._state.silence()
        if self._feed.epoch == batch.epoch:
            for event in batch.events:
                if isinstance(event, Heartbeat):
                    self._state.hear(event)
                    self._perform(self._feed.said(event.last_seq, now))

    def answered(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 2 or frames[0] != b"":
            self._bad_frames += 1
        elif frames[1] == b"":
            self._perform(self._feed.answers_ended(now))
        elif (batch := self._read(frames[1])) is not None:
            self._perform(self._feed.answered(_numbered(batch, frames[1]), batch.epoch, now))

    def _read(self, frame: bytes) -> Batch | None:
        try:
            batch = decode_batch(frame)
        except BadEvent:
            self._bad_frames += 1
            return None
        if batch.source != self.spec.name:
            self._skipped["other_source"] += 1
            return None
        return batch

    # ---- decisions into the table ----

    def _perform(self, actions: Sequence[NodeAction[Batch]]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self._batches += 1
                self._events += len(action.body.events)
                self._state.take(action.body)
            elif isinstance(action, Forget):
                self._state.forget(self._around.table)
            elif isinstance(action, Ignore):
                self._skipped[action.why.replace(" ", "_")] += 1
            elif isinstance(action, Resync):
                self._ask(Replay(action.from_seq))
            else:
                self._ask(Snapshot())
        if not self._feed.asking:
            self.line.end_answers()

    def _ask(self, request: Request) -> None:
        self.line.ask([b"", encode(request)])


def _numbered(batch: Batch, frame: bytes) -> Numbered[Batch]:
    return Numbered(batch.seq, batch, 0, len(frame))
