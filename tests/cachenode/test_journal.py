"""The journal: whoever follows it holds what the store holds, however late it asks."""

import random

from cacheindex.events import Batch, Heartbeat, Removed, Stored, decode_batch
from cachenode import journal
from cachenode.journal import Journal
from tests.cachenode.stores import Room, layout, prompt

BLOCK = 4096


def nothing() -> journal.Told:
    return 0, []


class Follower:
    """Applies batches as the index does."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.beats: list[Heartbeat] = []

    def apply(self, data: bytes) -> Batch:
        batch = decode_batch(data)
        for event in batch.events:
            if isinstance(event, Stored | Removed):
                keys = {event.keys[at : at + 16] for at in range(0, len(event.keys), 16)}
                mine = self.held.setdefault((event.layout, event.stride), set())
                mine |= keys
                if isinstance(event, Removed):
                    mine -= keys
            elif isinstance(event, Heartbeat):
                self.beats.append(event)
        return batch


def test_batches_are_numbered_and_neighbours_are_one_event() -> None:
    told = Journal("n", "life")
    for key in (b"a" * 16, b"b" * 16):
        told.stored("one", 32, key)
    told.removed("one", 32, b"a" * 16)
    told.stored("two", 64, b"c" * 16)
    batches = [decode_batch(data) for data in told.take(0.0, lambda: (7, [("w", "one")]))]
    assert [batch.seq for batch in batches] == [0, 1]
    assert {batch.epoch for batch in batches} == {"life"}
    assert batches[0].events == [
        Stored("memory", "one", b"a" * 16 + b"b" * 16, 32),
        Removed("memory", "one", b"a" * 16, 32),
        Stored("memory", "two", b"c" * 16, 64),
    ]
    assert batches[1].events == [Heartbeat(1, {"memory": 7}, {}, [("w", "one")])]


def test_a_heartbeat_each_second_and_nothing_else_when_idle() -> None:
    told = Journal("n", "life")
    times = [step / 10 for step in range(41)]
    assert sum(len(told.take(now, nothing)) for now in times) == 5


def test_large_changes_are_cut() -> None:
    told = Journal("n", "life")
    for number in range(journal.MAX_KEYS * 2 + 5):
        told.stored("one", 32, number.to_bytes(16, "big"))
    batches = told.take(0.0, nothing)
    assert len(batches) == 4
    follower = Follower()
    for data in batches:
        follower.apply(data)
    assert len(follower.held["one", 32]) == journal.MAX_KEYS * 2 + 5


def test_replay_gives_what_is_kept() -> None:
    told = Journal("n", "life")
    said = [told.take(float(second), nothing)[0] for second in range(10)]
    assert list(told.replay(4)) == said[4:]
    assert list(told.replay(99)) == []


def test_the_ring_is_bounded() -> None:
    told = Journal("n", "life")
    for second in range(journal.RING_BATCHES + 10):
        told.take(float(2 * second), nothing)
    assert len(list(told.replay(0))) == journal.RING_BATCHES


def test_a_snapshot_in_parts_while_the_store_changes() -> None:
    """Parts come one by one; between them records come and go. Snapshot, then every later batch: the truth."""
    for seed in range(20):
        rng = random.Random(seed)
        room = Room(64 * BLOCK)
        told = Journal("n", "life", room.store.held)
        room.store._holdings._sink = told
        room.store.open("s", layout(BLOCK), "map")
        room.store.open("o", layout(BLOCK, memory="other"), "map")

        def change(rng: random.Random = rng, room: Room = room) -> None:
            session = rng.choice("so")
            grants, _, _ = room.store.reserve(
                session, prompt(rng.randrange(30), rng.randrange(1, 20)).reserve()
            )
            room.store.commit(session, [grant.reservation for grant in grants])

        for _ in range(20):
            change()
        told.take(0.0, nothing)
        parts = told.snapshot()
        follower, later, upto = Follower(), list[bytes](), set[int]()
        for part in parts:
            upto.add(follower.apply(part).seq)
            change()
            later += told.take(0.0, nothing)
        assert len(upto) == 1
        for data in later:
            assert follower.apply(data).seq > max(upto)
        held: dict[tuple[str, int], set[bytes]] = {}
        for fingerprint, stride, keys in room.store.held():
            held.setdefault((fingerprint, stride), set()).update(
                keys[i : i + 16] for i in range(0, len(keys), 16)
            )
        assert {place: keys for place, keys in follower.held.items() if keys} == held


def test_an_empty_node_answers_too() -> None:
    told = Journal("n", "life")
    told.take(0.0, nothing)
    (part,) = told.snapshot()
    assert decode_batch(part).events == []
