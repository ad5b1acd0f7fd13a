"""One engine's event stream: what to believe of it, and its share of the table."""

from collections import Counter
from collections.abc import Sequence

import msgspec

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
from cacheindex.source import Address, Line, Socket, Surroundings
from cacheindex.table import Slot
from cacheindex.trust import Trust


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


class EngineSource:
    """For the hub's thread; the ``Listener`` of its own line. ``busy``: there is more to do without any
    message."""

    busy = False

    def __init__(self, spec: SourceSpec, around: Surroundings) -> None:
        self.spec = spec
        self.line = Line(
            Address(spec.endpoint, spec.replay_endpoint, spec.bind, spec.topic_prefix, MAX_FRAME_BYTES),
            around,
            self,
        )
        self._around = around
        self._feed: Feed[EngineBatch] = Feed(replays=spec.replay_endpoint is not None)
        self._skipped: Counter[str] = Counter()
        self._translator = self._new_translator()
        self._batches = self._events = self._bad_frames = 0
        self._lag: float | None = None

    # ---- for the hub ----

    def step(self, ready: Sequence[Socket], now: float) -> None:
        self.line.step(ready, now)

    def tick(self, now: float) -> None:
        self.line.tick(now)
        self._perform(self._feed.tick(now))
        self._close_stale_replay()

    def new_epoch(self, reason: str, now: float) -> None:
        self._perform(self._feed.new_epoch(reason, now))
        self._close_stale_replay()

    def report(self, agreed: bool, now: float) -> None:
        self._perform(self._feed.outcome(agreed, now))

    def close(self) -> None:
        """Close the sockets and withdraw what the source holds."""
        self.line.close()
        self._around.table.forget(self.spec.worker)

    def status(self) -> SourceStatus:
        feed, translator = self._feed, self._translator
        unasked = {f"replay_{why}": count for why, count in self.line.unasked.items()}
        return SourceStatus(
            trust=feed.trust,
            reason=self.line.trouble or feed.reason,
            connected=self.line.connected,
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
            skipped={**self._skipped, **unasked},
            lag_s=self._lag,
        )

    # ---- for the line ----

    def connected(self, now: float) -> None:
        self._perform(self._feed.on_connected(now))

    def lost(self, now: float) -> None:
        self._perform(self._feed.on_disconnected(now))
        self._close_stale_replay()

    def heard(self, frames: list[bytes], now: float) -> None:
        try:
            batch = parse(frames)
        except BadFrame:
            self._bad_frames += 1
            return
        if batch.timestamp is not None:
            self._lag = self._around.wall() - batch.timestamp
        self._perform(self._feed.live(_numbered(batch), now))

    def answered(self, frames: list[bytes], now: float) -> None:
        try:
            answer = parse_replay(frames)
        except BadFrame:
            self._bad_frames += 1
            return
        if isinstance(answer, EngineBatch):
            self._perform(self._feed.replayed(_numbered(answer), now))
        elif answer is ReplayEnd:
            self._perform(self._feed.replay_ended(now))
        self._close_stale_replay()

    def _close_stale_replay(self) -> None:
        if not self._feed.replaying:
            self.line.end_answers()

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
                self.line.ask(replay_request(action.from_seq))

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
