"""The index table against a model of it, and its promises one by one."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from index_fakes import keys_of

from cacheindex.table import ENTRY_BYTES, SET_BYTES, Slot, Table, by_holder

KEYS = [bytes([number]) * 16 for number in range(24)]
SLOTS = [
    Slot("a", "gpu"),
    Slot("a", "memory"),
    Slot("a", "gpu", group=1, stride=32),
    Slot("b", "gpu", stride=32),
    Slot("b", "gpu", layout="other"),
    Slot("c", "disk", stride=48),
]
SLOT = st.sampled_from(SLOTS)
SOME = st.lists(st.sampled_from(KEYS), max_size=12)
PROMPT = st.integers(0, len(KEYS)).map(lambda count: KEYS[:count]) | SOME


class TableMachine(RuleBasedStateMachine):
    """Store, remove, clear, forget and sweep against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(1 << 20)
        self.model: dict[Slot, set[bytes]] = {}
        self.seen: set[Slot] = set()
        self.gone: list[tuple[int, Slot, bytes]] = []

    @rule(slot=SLOT, keys=PROMPT)
    def store(self, slot: Slot, keys: list[bytes]) -> None:
        self.table.store(slot, keys)
        self.model.setdefault(slot, set()).update(keys)
        self.seen.add(slot)

    @rule(slot=SLOT, keys=SOME)
    def remove(self, slot: Slot, keys: list[bytes]) -> None:
        mark = self.table.mark()
        held = self.model.get(slot, set())
        self.table.remove(slot, keys)
        for key in KEYS:
            assert self.table.removed_since(slot, [key], mark) == (key in held and key in keys)
        held -= set(keys)

    @rule(slot=SLOT)
    def clear(self, slot: Slot) -> None:
        mark = self.table.mark()
        self.table.clear(slot)
        assert self.table.removed_since(slot, KEYS, mark) == (slot in self.seen)
        self.model.get(slot, set()).clear()

    @rule(holder=st.sampled_from("abc"))
    def forget(self, holder: str) -> None:
        self.table.forget(holder)
        for slot in [slot for slot in self.model if slot.holder == holder]:
            del self.model[slot]
        self.seen = {slot for slot in self.seen if slot.holder != holder}

    @rule(steps=st.integers(0, 30))
    def sweep(self, steps: int) -> None:
        self.table.sweep(steps)

    @rule(keys=PROMPT)
    def match(self, keys: list[bytes]) -> None:
        expected: dict[Slot, int] = {}
        for slot, held in self.model.items():
            reach, step = 0, slot.stride // 16
            while reach + step <= len(keys) and keys[reach + step - 1] in held:
                reach += step
            expected[slot] = reach * 16
        found = self.table.match(keys)
        assert {slot: n for slot, n in found.items() if n} == {s: n for s, n in expected.items() if n}
        assert all(expected[slot] == n for slot, n in found.items())
        a, other = (expected.get(SLOTS[index], 0) for index in (0, 2))
        both = min(a, other) if {SLOTS[0], SLOTS[2]} <= self.seen else max(a, other)
        assert by_holder(found).get("a", {}).get("gpu", 0) == both

    @invariant()
    def whole(self) -> None:
        self.table.check_integrity()
        for holder in "abc":
            held = {slot: len(keys) for slot, keys in self.model.items() if slot.holder == holder}
            counted = self.table.held_by(holder)
            assert {slot: n for slot, n in counted.items() if n} == {s: n for s, n in held.items() if n}


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_slot_is_tested_at_its_own_stride() -> None:
    table, keys = Table(1 << 20), keys_of(range(160))
    table.store(Slot("w", "gpu", stride=32), keys[1:6:2])
    table.store(Slot("v", "gpu"), keys[:5])
    assert {slot.holder: n for slot, n in table.match(keys).items()} == {"w": 96, "v": 80}
    assert {slot.holder: n for slot, n in table.match(keys[:3]).items()} == {"w": 32, "v": 48}
    with pytest.raises(ValueError, match="multiple of 16"):
        table.store(Slot("x", "gpu", stride=8), keys)


def test_by_holder_takes_the_least_group_and_the_best_layout() -> None:
    found = {
        Slot("a", "gpu"): 64,
        Slot("a", "gpu", group=1): 32,
        Slot("a", "gpu", layout="x"): 48,
        Slot("a", "disk"): 16,
        Slot("b", "gpu"): 16,
        Slot("b", "gpu", group=1): 0,
    }
    assert by_holder(found) == {"a": {"gpu": 48, "disk": 16}}


def test_a_group_that_holds_nothing_counts_as_nothing() -> None:
    table, keys = Table(1 << 20), keys_of(range(64))
    table.store(Slot("w", "gpu"), keys)
    table.store(Slot("w", "gpu", group=1), keys[:1])
    table.remove(Slot("w", "gpu", group=1), keys[:1])
    assert by_holder(table.match(keys)) == {}


def test_runs_share_their_holders() -> None:
    table, keys = Table(1 << 24), keys_of(range(16 * 500))
    for worker in range(20):
        table.store(Slot(f"w{worker}", "gpu"), keys)
    assert (table.stats().entries, table.stats().sets) == (500, 1)


def test_the_budget_holds_and_the_coldest_go() -> None:
    table = Table(64 * ENTRY_BYTES + 4 * SET_BYTES)
    slot, old, new = Slot("w", "gpu"), keys_of(range(16 * 30)), keys_of(range(7, 7 + 16 * 50))
    table.store(slot, old)
    mark = table.mark()
    table.touch(old[:4])
    table.store(slot, new)
    stats = table.stats()
    assert stats.bytes_used <= stats.bytes_limit
    assert stats.lost == 80 - stats.entries > 0
    # What was touched, and the beginnings of prompts, outlive the rest.
    assert table.match(old)[slot] >= 64
    assert table.match(new)[slot] == 16 * 50
    assert table.removed_since(slot, old[-1:], mark)
    table.store(slot, [bytes([n % 256, n // 256]) * 8 for n in range(5000)])
    table.check_integrity()


def test_forgetting_costs_sets_and_space_comes_back() -> None:
    table, keys = Table(1 << 24), keys_of(range(16 * 1000))
    table.store(Slot("a", "gpu"), keys)
    table.store(Slot("b", "gpu"), keys[:10])
    table.forget("a")
    assert (table.stats().entries, table.stats().dead) == (1000, 990)
    assert table.match(keys) == {Slot("b", "gpu"): 160}
    steps = 0
    while table.sweep(100):
        steps += 1
    assert (table.stats().entries, table.stats().dead) == (10, 0)
    assert steps <= 10
    table.check_integrity()


def test_history_that_was_overrun_rules_nothing_out() -> None:
    table, slot, keys = Table(1 << 20, history=10), Slot("w", "gpu"), keys_of(range(16 * 30))
    table.store(slot, keys)
    mark = table.mark()
    table.remove(slot, keys[:5])
    assert not table.removed_since(slot, keys[5:], mark)
    assert not table.removed_since(Slot("v", "gpu"), keys, mark)
    table.remove(slot, keys[5:25])
    assert table.removed_since(slot, keys[25:], mark)
    assert not table.removed_since(slot, keys[25:], table.mark())
    table.check_integrity()


def test_a_budget_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        Table(100)


def test_readers_beside_the_writer() -> None:
    """A prompt that one holder keeps throughout is found whole by every reader, whatever the
    writer does to others meanwhile."""
    table, keys = Table(1 << 22), keys_of(range(16 * 60))
    kept, stop, wrong = Slot("kept", "gpu"), threading.Event(), list[object]()
    table.store(kept, keys)

    def read() -> None:
        while not stop.is_set():
            found = table.match(keys)
            if found.get(kept) != 16 * 60:
                wrong.append(found)
            table.removed_since(kept, keys, table.mark())
            table.touch(keys)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(200):
        other = Slot(f"other{turn % 5}", "gpu", stride=16 * (1 + turn % 2))
        table.store(other, keys)
        table.remove(other, keys[10:20])
        if turn % 3 == 0:
            table.forget(other.holder)
        table.sweep(50)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    table.check_integrity()
