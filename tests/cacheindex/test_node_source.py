"""The dialect of nodes: what frames mean, and what is passed over."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from index_fakes import SECRET, endpoint
from node_fakes import MEMORY, ModelNode, key

from cacheindex.events import VERSION, Batch, Cleared, Heartbeat, Stored, encode
from cacheindex.keys import pack_keys
from cacheindex.node_source import NodeSource, NodeSpec
from cacheindex.source import Surroundings
from cacheindex.table import Slot, Table

SLOT = Slot("n", MEMORY, "one")


class Rig:
    """A source whose frames are handed to it; what it asks goes to nobody."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self.now = self.passing = 0.0
        self.table = Table(1 << 24)
        self.node = ModelNode("n")
        spec = NodeSpec("n", endpoint(folder, "ev"), endpoint(folder, "re"))
        around = Surroundings(self.table, context, SECRET, self.clock, lambda: 0.0, 100)
        self.source = NodeSource(spec, around)

    def clock(self) -> float:
        """``passing`` seconds go by with each look."""
        self.now += self.passing
        return self.now

    def hear(self, *batches: Batch) -> None:
        for batch in batches:
            self.source.heard([b"n", encode(batch)], self.now)
        self.turn()

    def turn(self) -> None:
        self.source.step([], self.now)
        while self.source.busy:
            self.source.step([], self.now)
        self.now += 1.0
        self.source.tick(self.now)

    def answer(self, *batches: Batch) -> None:
        for batch in batches:
            self.source.answered([b"", encode(batch)], self.now)
        self.source.answered([b"", b""], self.now)
        self.turn()


@pytest.fixture
def rig() -> Iterator[Rig]:
    folder = Path(tempfile.mkdtemp(prefix="hp"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rig = Rig(context, folder)
    rig.source.connected(0.0)
    rig.answer(Batch(VERSION, "n", "life 1", 0, []))
    assert rig.source.status().trust == "exact"
    yield rig
    rig.source.close()
    assert not rig.table.match([key(1)])
    context.destroy(linger=0)
    shutil.rmtree(folder)


def test_stored_removed_cleared(rig: Rig) -> None:
    rig.hear(rig.node.store([key(1), key(2)]))
    assert rig.table.match([key(1), key(2), key(3)]) == {SLOT: 32}
    rig.hear(rig.node.remove([key(2)]))
    assert rig.table.match([key(1), key(2)]) == {SLOT: 16}
    rig.hear(rig.node.store([key(9)], "two", 32), rig.node.clear())
    assert rig.table.match([key(1), key(9)]) == {Slot("n", MEMORY, "two", 32): 32}
    status = rig.source.status()
    assert (status.keys, status.batches, status.last_seq) == (1, 5, 4)


def test_what_a_node_says_of_itself(rig: Rig) -> None:
    rig.node.serves = [("w0", "one"), ("w1", "two")]
    rig.hear(rig.node.beat())
    status = rig.source.status()
    assert (status.fill, status.rates) == ({"memory": 100}, {"memory": 2.0})
    assert status.serves == {"w0": {"one"}, "w1": {"two"}}
    rig.source.lost(0.0)
    assert rig.source.status().serves == {}
    assert rig.source.status().trust == "syncing"


def test_another_life_serves_nobody_until_it_says_so(rig: Rig) -> None:
    rig.node.serves = [("w0", "one")]
    rig.hear(rig.node.store([key(1)]), rig.node.beat())
    assert rig.source.status().serves
    rig.hear(Batch(VERSION, "n", "another", 0, [Cleared(MEMORY, "one")]))
    assert (rig.source.status().serves, rig.source.status().epoch) == ({}, "another")
    assert not rig.table.match([key(1)])
    rig.hear(Batch(VERSION, "n", "life 1", 9, [Heartbeat(9, {}, {}, [("w0", "one")])]))
    assert rig.source.status().serves == {}, "the late word of a dead node"


def test_a_replayed_heartbeat_is_old_news(rig: Rig) -> None:
    rig.node.serves = [("w0", "one")]
    old = rig.node.beat()
    rig.node.serves = []
    rig.now = 1.0
    rig.hear(rig.node.beat())
    rig.answer(old, rig.node.said[-1])
    assert rig.source.status().last_seq == 2
    assert rig.source.status().serves == {}


def test_what_is_no_batch_of_this_node_is_passed_over(rig: Rig) -> None:
    good = encode(rig.node.store([key(1)]))
    other = encode(Batch(VERSION, "other", "life 1", 1, []))
    for frames in ([b"n"], [b"n2", good], [b"n", good, b""], [b"n", other]):
        rig.source.heard(frames, 0.0)
    for frame in (
        b"",
        b"\xc1",
        good[:-3],
        encode(Batch(VERSION + 1, "n", "life 1", 1, [])),
        encode(Batch(VERSION, "n", "life 1", -1, [])),
        encode(Batch(VERSION, "n", "life 1", 1, [Stored(MEMORY, "one", b"short")])),
        b"\xdd\xff\xff\xff\xff",
    ):
        rig.source.heard([b"n", frame], 0.0)
    rig.source.answered([good], 0.0)
    rig.source.answered([b"x", good], 0.0)
    status = rig.source.status()
    assert (status.bad_frames, status.last_seq) == (9, 0)
    assert status.skipped == {"other_topic": 3, "other_source": 1}
    rig.source.heard([b"n", good], 0.0)
    rig.turn()
    assert rig.table.match([key(1)]) == {SLOT: 16}


def test_much_at_once_enters_in_turns(rig: Rig) -> None:
    """While it does, nothing more is read, and nobody who waits for us is late."""
    many = pack_keys(map(key, range(5000)))
    batch = rig.node.batch(Stored(MEMORY, "one", many))
    rig.source.heard([b"n", encode(batch)], 0.0)
    turns, rig.passing = 0, 1.0
    while rig.source.busy:
        rig.source.step([], rig.now)
        rig.source.tick(rig.now)
        turns += 1
        assert rig.source.status().trust in ("exact", "syncing")
    assert turns == 5
    assert rig.source.status().keys == 5000
    rig.passing = 0.0
    rig.hear(rig.node.beat())
    assert rig.source.status().trust == "exact"


def test_a_question_that_cannot_be_sent_is_counted(rig: Rig) -> None:
    source = NodeSource(
        NodeSpec("n", "ipc:///tmp/hp-none", "tcp://nowhere.invalid:x"),
        Surroundings(Table(1 << 20), zmq.Context(), SECRET, lambda: 0.0, lambda: 0.0, 100),
    )
    source.connected(0.0)
    assert sum(source.status().skipped.values()) == 1
    assert source.status().trust == "syncing"
    source.close()
