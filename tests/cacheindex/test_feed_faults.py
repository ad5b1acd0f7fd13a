"""A feed, a translator and a table behind a bad line: after quiet they say what the engine holds."""

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from index_fakes import MODEL, SECRET, ModelEngine, frames, keys_of, payload

from cacheindex.actions import Action, Apply, Forget, Ignore, Resync
from cacheindex.engine_events import EngineBatch, parse
from cacheindex.engine_state import Translator
from cacheindex.events import Removed, Stored
from cacheindex.feed import Feed
from cacheindex.keys import unpack_keys
from cacheindex.pending import Numbered
from cacheindex.table import Slot, Table


class Rig:
    """A model engine behind a bad line, with a feed, a translator and a table at the other end."""

    def __init__(self, rng: random.Random, loss: float, ring: int, replays: bool) -> None:
        self.rng, self.loss, self.now = rng, loss, 0.0
        self.size = rng.choice([1, 16, 32])
        self.ring: deque[tuple[int, EngineBatch]] = deque(maxlen=ring)
        self.feed: Feed[EngineBatch] = Feed(replays=replays)
        self.table = Table(1 << 24)
        self.line: list[EngineBatch] = []
        self.asked: int | None = None
        self.life = 0
        self.boot()

    def boot(self) -> None:
        self.life += 1
        self.engine = ModelEngine(self.size, 300 // self.size)
        self.seq = 0
        self.ring.clear()
        self.line.clear()
        self.asked = None

    def perform(self, actions: list[Action[EngineBatch]]) -> None:
        for action in actions:
            if isinstance(action, Forget):
                self.table.forget("w")
                self.translator = Translator(MODEL, SECRET)
            elif isinstance(action, Resync):
                self.asked = action.from_seq
            elif isinstance(action, Apply):
                self.apply(action.body)
            else:
                assert isinstance(action, Ignore)

    def apply(self, body: EngineBatch) -> None:
        for change in self.translator.apply(body):
            slot = Slot("w", change.event.tier, "", change.stride, change.group)
            if isinstance(change.event, Stored):
                self.table.store(slot, unpack_keys(change.event.keys))
            elif isinstance(change.event, Removed):
                self.table.remove(slot, unpack_keys(change.event.keys))
            else:
                self.table.clear(slot)

    def publish(self, events: list[dict[str, Any]], loss: float) -> None:
        got = parse(frames(self.seq, payload(events, timestamp=self.now + self.life * 1e6)))
        self.ring.append((self.seq, got))
        self.seq += 1
        if self.rng.random() >= loss:
            self.line += [got] * (2 if self.rng.random() < self.loss else 1)
        if len(self.line) > 1 and self.rng.random() < self.loss:
            self.line[-1], self.line[-2] = self.line[-2], self.line[-1]

    def turn(self, *, hold: bool = False) -> None:
        """Deliver what is on the line, answer replays, let time pass."""
        self.now += self.rng.choice([0.01, 0.1, 0.3])
        while self.line and not (hold and self.rng.random() < 0.3):
            got = self.line.pop(0)
            self.perform(self.feed.live(number_of(got), self.now))
        if self.asked is not None and self.rng.random() >= self.loss / 2:
            start, self.asked = self.asked, None
            for seq, got in list(self.ring):
                if seq >= start and self.feed.replaying and self.asked is None:
                    self.perform(self.feed.replayed(number_of(got), self.now))
            if self.asked is None:
                self.perform(self.feed.replay_ended(self.now))
        self.perform(self.feed.tick(self.now))

    def settle(self) -> None:
        for _ in range(100):
            self.now += 1.0
            self.turn()


def number_of(got: EngineBatch) -> Numbered[EngineBatch]:
    return Numbered(got.seq, got, got.digest, got.size)


def restart(rig: Rig) -> None:
    """Seen by the connection, and perhaps back at the old number when it is heard again; or unseen
    (behind a proxy): then its numbers begin again, which says so."""
    old = rig.seq
    seen = rig.rng.random() < 0.7
    if not seen:
        rig.settle()
    rig.boot()
    if seen:
        rig.perform(rig.feed.on_disconnected(rig.now))
        for _ in range(old if rig.rng.random() < 0.5 else 0):
            rig.publish(rig.engine.compute([rig.rng.randrange(5) for _ in range(50)]), loss=1.0)
        rig.perform(rig.feed.on_connected(rig.now))


def drive(rig: Rig, turns: int, restarts: bool) -> list[list[int]]:
    rng, prompts = rig.rng, list[list[int]]()
    rig.perform([Forget("start")])
    rig.perform(rig.feed.on_connected(0.0))
    stems = [[rng.randrange(5) for _ in range(rng.randrange(1, 90))] for _ in range(3)]
    for turn in range(turns):
        if restarts and turn == turns // 2:
            restart(rig)
        prompt = rng.choice(stems) + [rng.randrange(5) for _ in range(rng.randrange(1, 60))]
        prompts.append(prompt)
        rig.publish(rig.engine.compute(prompt), rig.loss)
        if rng.random() < 0.03:
            rig.publish(rig.engine.clear(), rig.loss)
        rig.turn(hold=True)
    rig.publish([], 0.0)
    rig.settle()
    return prompts


def reaches(rig: Rig, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    stride = max(rig.size, 16)
    said = [max(rig.table.match(keys_of(prompt)).values(), default=0) for prompt in prompts]
    return said, [rig.engine.reach(prompt, stride) for prompt in prompts]


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.05, 0.2]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_after_quiet_the_table_equals_the_engine(seed: int, loss: float, restarts: bool) -> None:
    """40 runs: loss, duplicates, reordering, delay, unanswered replays, restarts in between."""
    rig = Rig(random.Random(seed), loss, ring=10_000, replays=True)
    prompts = drive(rig, 25, restarts)
    said, truth = reaches(rig, prompts)
    assert said == truth
    assert rig.feed.trust == "exact"
    rig.translator.check_integrity()
    rig.table.check_integrity()


@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 0.3]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_without_history_the_table_never_says_too_much(seed: int, loss: float, replays: bool) -> None:
    """40 runs without a replay, or with one that reaches back three batches: after quiet nothing is
    claimed that the engine does not hold."""
    rig = Rig(random.Random(seed), loss, ring=3, replays=replays)
    prompts = drive(rig, 25, restarts=False)
    said, truth = reaches(rig, prompts)
    assert all(claim <= held for claim, held in zip(said, truth, strict=True))
    rig.table.check_integrity()
