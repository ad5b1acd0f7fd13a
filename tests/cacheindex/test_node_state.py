"""Feed, state and table behind a bad line: after quiet they say what the node holds. And what a hostile
node can do: nothing beyond its bounds."""

import math
import random
from collections import Counter, deque
from typing import Any

import pytest
from node_fakes import MEMORY, ModelNode, key

from cacheindex.actions import Apply, Forget, Ignore, Limits, Resync
from cacheindex.events import (
    VERSION,
    Batch,
    Cleared,
    Event,
    Heartbeat,
    Removed,
    Replay,
    Snapshot,
    Stored,
    decode_batch,
    encode,
)
from cacheindex.keys import pack_keys
from cacheindex.node_feed import NodeAction, NodeFeed
from cacheindex.node_state import MAX_SERVES, MAX_SLOTS, NodeState
from cacheindex.pending import Numbered
from cacheindex.table import Slot, Table

SEQUENCES = 3000


class Rig:
    """A model node, a line that drops, doubles and swaps batches, and our side of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.node = ModelNode("n", ring=rng.choice([1, 4, 16, 200]), part=rng.choice([1, 5, 100]))
        self.feed: NodeFeed[Batch] = NodeFeed(
            limits=Limits(pending_batches=rng.choice([2, 8, 4096]), cooldown_most_s=2.0)
        )
        self.table = Table(1 << 20)
        self.skipped: Counter[str] = Counter()
        self.state = NodeState("n", self.skipped)
        self.loss, self.doubling, self.swapping = (rng.choice([0.0, 0.05, 0.3]) for _ in range(3))
        self.deafness = rng.choice([0.0, 0.2])
        self.line: deque[Batch] = deque()
        self.answers: deque[Batch | None] = deque()
        self.perform(self.feed.on_connected(self.now))

    def perform(self, actions: list[NodeAction[Batch]]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.state.take(action.body)
            elif isinstance(action, Forget):
                self.state.forget(self.table)
            elif isinstance(action, Resync):
                self.ask(Replay(action.from_seq))
            elif not isinstance(action, Ignore):
                self.ask(Snapshot())

    def ask(self, request: Replay | Snapshot) -> None:
        """The answers are those of this moment and come later, or not, or not to their end."""
        self.answers.clear()
        if self.rng.random() < self.deafness:
            return
        self.answers.extend(self.node.answers(request))
        self.answers.append(None)
        if self.rng.random() < self.deafness:
            self.answers.pop()

    def publish(self, batch: Batch) -> None:
        if self.rng.random() >= self.loss:
            self.line.append(batch)
        if self.rng.random() < self.doubling:
            self.line.append(batch)
        if self.rng.random() < self.swapping and len(self.line) > 1:
            self.line[-1], self.line[-2] = self.line[-2], self.line[-1]

    def hear(self) -> None:
        if not self.line:
            return
        batch = decode_batch(encode(self.line.popleft()))
        self.perform(self.feed.live(Numbered(batch.seq, batch, 0, 1), batch.epoch, self.now))
        for event in batch.events:
            if isinstance(event, Heartbeat) and batch.epoch == self.feed.epoch:
                self.state.hear(event)
                self.perform(self.feed.said(event.last_seq, self.now))

    def read_answer(self) -> None:
        if not self.answers:
            return
        batch = self.answers.popleft()
        if batch is None:
            self.perform(self.feed.answers_ended(self.now))
        else:
            self.perform(self.feed.answered(Numbered(batch.seq, batch, 0, 1), batch.epoch, self.now))

    def reconnect(self) -> None:
        self.line.clear()
        self.perform(self.feed.on_disconnected(self.now))
        self.answers.clear()
        self.perform(self.feed.on_connected(self.now))

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.01:
            self.publish(self.node.boot())
            self.answers.clear()  # The socket that would answer is gone.
            if self.rng.random() < 0.7:
                self.reconnect()
        elif draw < 0.02:
            self.reconnect()
        elif draw < 0.35:
            self.publish(self.node.anything(self.rng))
        elif draw < 0.65:
            self.hear()
        elif draw < 0.85:
            self.read_answer()
        elif draw < 0.95:
            self.state.work(self.table, self.rng.randint(1, 20))
        else:
            self.now += self.rng.choice([0.05, 0.3, 1.2])
            self.perform(self.feed.tick(self.now))

    def settle(self) -> None:
        """A good line, heartbeats, time."""
        self.loss = self.doubling = self.swapping = self.deafness = 0.0
        for _ in range(12):
            self.publish(self.node.beat())
            while self.line or self.answers or self.state.busy:
                self.hear()
                self.read_answer()
                self.state.work(self.table, 50)
            self.now += 1.0
            self.perform(self.feed.tick(self.now))
            while self.answers:
                self.read_answer()

    def known(self) -> dict[Slot, set[bytes]]:
        found: dict[Slot, set[bytes]] = {}
        for number in range(60):
            one = key(number)
            for slot in self.table.match([one]) | self._wide(one):
                found.setdefault(slot, set()).add(one)
        return found

    def _wide(self, one: bytes) -> dict[Slot, int]:
        """Slots of larger strides: their key is the last of a block."""
        return self.table.match([b"?", one]) | self.table.match([b"?"] * 3 + [one])


@pytest.mark.parametrize("part", range(6))
def test_after_quiet_the_table_says_what_the_node_holds(part: int) -> None:
    whole = 0
    for seed in range(part * SEQUENCES // 6, (part + 1) * SEQUENCES // 6):
        rig = Rig(random.Random(seed))
        for _ in range(rig.rng.randint(5, 120)):
            rig.step()
        rig.settle()
        rig.state.recount(rig.table)
        truth = {slot: keys for slot, keys in rig.node.held.items() if keys}
        assert rig.known() == truth, f"seed {seed}: {rig.feed.trust}, {rig.feed.reason}"
        assert rig.feed.trust == "exact", f"seed {seed}: {rig.feed.reason}"
        assert rig.state.keys == sum(map(len, truth.values())), f"seed {seed}"
        assert rig.feed.last_seq == rig.node.seq - 1
        rig.state.check_integrity()
        rig.table.check_integrity()
        whole += bool(truth)
    assert whole > SEQUENCES / 6 / 2, "most sequences end with something held"


def test_what_is_known_before_quiet_was_held_at_some_time() -> None:
    """Never a key of another life, and never of a node that is not connected."""
    for seed in range(200):
        rig = Rig(random.Random(seed))
        rig.perform(rig.feed.on_disconnected(rig.now))
        assert not rig.known()


# ---- bounds ----


class Held:
    def __init__(self, **how: Any) -> None:
        self.table, self.skipped = Table(1 << 24), Counter[str]()
        self.state = NodeState("n", self.skipped, **how)

    def take(self, *events: Event, most: int = 1000) -> int:
        """How many steps it took."""
        self.state.take(Batch(VERSION, "n", "e", 0, list(events)))
        steps = 1
        while self.state.work(self.table, most):
            steps += 1
        self.state.check_integrity()
        self.state.recount(self.table)
        self.state.check_integrity()
        self.table.check_integrity()
        return steps


def keys(*numbers: int) -> bytes:
    return pack_keys(map(key, numbers))


def test_large_events_enter_in_steps() -> None:
    held = Held()
    assert held.take(Stored(MEMORY, "l", keys(*range(1000))), Removed(MEMORY, "l", keys(1)), most=100) > 9
    assert held.state.keys == 999
    assert held.table.match([key(0), key(1)]) == {Slot("n", MEMORY, "l"): 16}
    held.take(Cleared(MEMORY, "l"))
    assert held.state.keys == 0
    assert not held.table.match([key(0)])


def test_forgetting_drops_what_waits() -> None:
    held = Held()
    held.state.take(Batch(VERSION, "n", "e", 0, [Stored(MEMORY, "l", keys(*range(50)))]))
    assert held.state.work(held.table, 10)
    held.state.forget(held.table)
    assert not held.state.busy
    assert not held.table.match([key(0)])
    held.state.check_integrity()


def test_a_layout_is_cleared_whatever_stride_was_told() -> None:
    held = Held()
    held.take(Stored(MEMORY, "l", keys(1), 32), Stored(MEMORY, "other", keys(1), 32), Cleared(MEMORY, "l"))
    assert held.table.match([b"", key(1)]) == {Slot("n", MEMORY, "other", 32): 32}


@pytest.mark.parametrize("stride", [0, -16, 8, 17, 1 << 20, 2**62])
def test_impossible_strides_are_passed_over(stride: int) -> None:
    held = Held()
    held.take(Stored(MEMORY, "l", keys(1), stride), Removed(MEMORY, "l", keys(1), stride))
    held.take(Cleared(MEMORY, "l", stride), Stored(MEMORY, "l" * 200, keys(1)))
    assert held.skipped == {"no_such_slot": 4}
    assert held.state.keys == 0


def test_keys_and_layouts_are_bounded() -> None:
    held = Held(max_keys=1000)
    held.take(Stored(MEMORY, "l", keys(*range(900))), Stored(MEMORY, "l", keys(*range(900, 1100))))
    assert (held.state.keys, held.skipped) == (1000, {"too_many_keys": 100})
    held.take(Removed(MEMORY, "l", keys(*range(100))), Stored(MEMORY, "l", keys(*range(50))))
    assert (held.state.keys, held.skipped) == (950, {"too_many_keys": 100})
    held.take(Cleared(MEMORY, "l"))
    held.take(*(Stored(MEMORY, f"l{number}", keys(number)) for number in range(MAX_SLOTS + 5)))
    assert (held.state.keys, held.skipped["too_many_slots"]) == (MAX_SLOTS, 5)


def test_what_is_said_twice_changes_nothing() -> None:
    """As it happens where a node tells what it holds while that changes."""
    held = Held()
    held.take(Removed(MEMORY, "l", keys(1)), Stored(MEMORY, "l", keys(2, 3)), Stored(MEMORY, "l", keys(2)))
    assert held.state.keys == 2
    held.take(Removed(MEMORY, "l", keys(2)), Removed(MEMORY, "l", keys(2)))
    assert held.state.keys == 1


def test_heartbeats_are_believed_within_reason() -> None:
    held = Held()
    beat = Heartbeat(
        0,
        {"memory": 5, "gpu": -1, "disk": 2**63, "lies": 1},
        {"memory": 2.5, "gpu": math.nan, "disk": math.inf, "remote": -1.0, "lies": 1.0},
        [("w", "one"), ("w", "two"), ("v", "one"), ("x" * 200, "l"), ("y", "l" * 200)],
    )
    held.state.hear(beat)
    facts = held.state.facts
    assert (facts.fill, facts.rates) == ({"memory": 5}, {"memory": 2.5})
    assert facts.serves == {"w": {"one", "two"}, "v": {"one"}}
    held.state.hear(Heartbeat(0, {}, {}, [(f"w{number}", "l") for number in range(2 * MAX_SERVES)]))
    assert len(held.state.facts.serves) == MAX_SERVES
    held.state.silence()
    assert not held.state.facts.serves
