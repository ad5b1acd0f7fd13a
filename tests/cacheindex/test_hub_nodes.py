"""The hub against nodes on real sockets, beside engines."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from index_fakes import SECRET, endpoint, eventually
from node_fakes import MEMORY, NodePublisher, key

from cacheindex.events import VERSION, Batch, Replay, Snapshot, Stored
from cacheindex.hub import Hub, NodeSpec, NodeStatus, SourceSpec
from cacheindex.keys import pack_keys
from cacheindex.table import Table, by_holder
from cachenode.journal import Journal
from cachenode.publisher import Publisher

KEYS = [key(number) for number in range(300)]

Boot = Callable[..., NodePublisher]


class Line:
    """One node and what the hub makes of it."""

    def __init__(self, hub: Hub, boot: Boot) -> None:
        self.hub, self.boot = hub, boot
        self.node = boot()

    @property
    def status(self) -> NodeStatus:
        status = self.hub.node("n")
        assert status is not None
        return status

    @property
    def reach(self) -> int:
        return by_holder(self.hub.table.match(KEYS)).get("n", {}).get("memory", 0)

    def reaches(self, tokens: int, deadline: float = 8.0) -> None:
        eventually(lambda: self.reach == tokens, f"{tokens} tokens, there are {self.reach}", deadline)

    def trusted(self, trust: str) -> None:
        eventually(lambda: self.status.trust == trust, f"{trust}, it is {self.status}")

    def believed(self) -> None:
        """Exact in the end; meanwhile the node is heard, as nodes are."""

        def exact() -> bool:
            if self.status.reason == "no heartbeat":
                self.node.say(self.node.model.beat())
            return self.status.trust == "exact"

        eventually(exact, f"exact, it is {self.status}")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(Table(1 << 26), secret=SECRET, max_queue=2000)
    hub.start()
    yield hub
    hub.close()
    assert hub.snapshot().errors == 0
    assert hub.node("n") is None
    hub.table.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name == "cacheindex-hub"]


@pytest.fixture
def line(hub: Hub, folder: Path) -> Iterator[Line]:
    context: zmq.Context[Any] = zmq.Context()
    nodes: list[NodePublisher] = []

    def boot(*, before: int = 0) -> NodePublisher:
        """The node of that name anew, holding so many keys before anybody listens."""
        if nodes:
            nodes[-1].close()
        node = NodePublisher(context, endpoint(folder, "ev"), endpoint(folder, "re"))
        for number in range(len(nodes)):
            node.model.life = number + 2
        nodes.append(node)
        for number in range(before):
            node.model.store([KEYS[number]])
        return node

    line = Line(hub, boot)
    hub.watch_node(NodeSpec("n", endpoint(folder, "ev"), endpoint(folder, "re")))
    line.node.wait_subscribed()
    yield line
    nodes[-1].close()
    context.destroy(linger=0)


def test_events_arrive(line: Line) -> None:
    line.believed()
    line.node.say(line.node.model.store(KEYS[:3]))
    line.reaches(48)
    line.node.say(line.node.model.remove(KEYS[2:3]))
    line.reaches(32)
    line.node.say(line.node.model.clear())
    line.reaches(0)
    line.believed()
    eventually(lambda: line.status.keys == 0, "nothing is counted")
    assert (line.status.epoch, line.status.connected) == ("life 1", True)


def test_history_before_our_time_is_told(line: Line, hub: Hub, folder: Path) -> None:
    hub.unwatch("n")
    eventually(lambda: hub.node("n") is None, "it is not watched")
    line.node = line.boot(before=200)
    hub.watch_node(NodeSpec("n", endpoint(folder, "ev"), endpoint(folder, "re")))
    line.reaches(16 * 200)
    line.believed()
    assert isinstance(line.node.asked[0], Snapshot)
    assert line.status.snapshots == 1


def test_a_gap_is_healed_by_replay(line: Line) -> None:
    line.believed()
    model = line.node.model
    with line.node.lock:
        model.store(KEYS[:2])
        model.remove(KEYS[1:2])
        last = model.store(KEYS[1:3])
    line.node.say(last)
    line.reaches(48)
    line.believed()
    assert line.node.asked[-1] == Replay(1)
    assert (line.status.gaps, line.status.replays) == (1, 1)


def test_a_gap_beyond_the_ring_is_told_anew(line: Line) -> None:
    line.believed()
    with line.node.lock:
        for number in range(100):
            last = line.node.model.store([KEYS[number]])
    line.node.say(last)
    line.reaches(16 * 100)
    line.believed()
    assert isinstance(line.node.asked[-1], Snapshot)


def test_a_restart_is_another_life(line: Line) -> None:
    line.believed()
    line.node.model.serves = [("w", "one")]
    line.node.say(line.node.model.store(KEYS[:3]))
    line.node.say(line.node.model.beat())
    line.reaches(48)
    eventually(lambda: line.hub.serves("n", "w") == {"one"}, "the worker it serves")
    line.node = line.boot(before=1)
    line.reaches(16)
    line.believed()
    assert not line.hub.serves("n", "w")
    assert (line.status.epoch, line.status.epochs) == ("life 2", 2)


def test_a_node_that_is_gone_holds_nothing(line: Line, hub: Hub) -> None:
    line.node.model.serves = [("w", "one")]
    line.node.say(line.node.model.store(KEYS[:3]))
    line.node.say(line.node.model.beat())
    line.reaches(48)
    line.node.close()
    line.reaches(0, deadline=2.0)
    eventually(lambda: not line.status.connected, "not connected")
    assert (line.status.trust, line.status.reason, hub.serves("n", "w")) == (
        "syncing",
        "not connected",
        set(),
    )
    line.node = line.boot()


def test_silence_is_suspect(line: Line, hub: Hub) -> None:
    line.node.model.serves = [("w", "one")]
    line.node.say(line.node.model.beat())
    eventually(lambda: hub.serves("n", "w"), "it serves")
    line.trusted("suspect")
    assert (line.status.reason, hub.serves("n", "w")) == ("no heartbeat", set())
    line.node.say(line.node.model.beat())
    line.believed()
    assert hub.serves("n", "w") == {"one"}


def test_a_node_that_answers_nothing_is_never_believed(line: Line) -> None:
    line.believed()
    line.node = line.boot()
    line.node.deaf = True
    line.node.wait_subscribed()
    line.node.say(line.node.model.store(KEYS[:3]))
    eventually(lambda: line.node.asked, "a question")
    line.trusted("syncing")
    assert line.reach == 0
    line.node.deaf = False
    line.reaches(48)
    line.believed()


def test_a_large_node_keeps_nobody_waiting(line: Line, hub: Hub) -> None:
    line.believed()
    other = pack_keys(key(number) for number in range(1000, 101_000))
    line.node.say(line.node.model.batch(Stored(MEMORY, "one", other)))
    turns = hub.snapshot().turns
    eventually(lambda: line.status.keys == 100_000, "all of it is known", 20)
    assert hub.snapshot().turns - turns > 20
    line.believed()


def test_garbage_is_counted(line: Line) -> None:
    line.believed()
    for frames in ([b"n"], [b"n", b"\xc1"], [b"n"] * 40, [b"nn", b""]):
        line.node.raw(frames)
    for number in range(3):
        line.node.raw([b"n", b"\x00" * number])
    line.node.say(Batch(VERSION, "n", "life 1", 1, [Stored(MEMORY, "one", KEYS[0])]))
    line.reaches(16)
    eventually(lambda: line.status.bad_frames == 4, "bad frames")
    assert line.status.skipped == {"other_topic": 3}


def test_with_a_real_nodes_words(hub: Hub, folder: Path) -> None:
    """Journal and publisher as a node has them, over a store that goes on while it tells what it holds."""
    held: dict[tuple[str, int], bytes] = {}
    journal = Journal("real", "life", lambda: iter([(*place, keys) for place, keys in held.items()]))
    held["one", 32] = pack_keys(KEYS[1:200:2])
    publisher = Publisher(journal, endpoint(folder, "rev"), endpoint(folder, "rre"))
    begun = time.monotonic()

    def turn() -> None:
        publisher.turn(time.monotonic() - begun, lambda: (7, [("w", "one")]))

    def holds(tokens: int) -> bool:
        turn()
        found = by_holder(hub.table.match(KEYS)).get("real", {})
        status = hub.node("real")
        return found.get("memory", 0) == tokens and status is not None and status.trust == "exact"

    try:
        turn()
        hub.watch_node(NodeSpec("real", endpoint(folder, "rev"), endpoint(folder, "rre")))
        eventually(lambda: holds(16 * 200), "what it held before")
        held["one", 32] = pack_keys(KEYS[1:100:2])
        journal.removed("one", 32, pack_keys(KEYS[101:200:2]))
        eventually(lambda: holds(16 * 100), "less")
        held["one", 32] = pack_keys(KEYS[1:300:2])
        journal.stored("one", 32, pack_keys(KEYS[101:300:2]))
        eventually(lambda: holds(16 * 300), "more")
        eventually(lambda: holds(16 * 300) and hub.serves("real", "w") == {"one"}, "whom it serves")
        status = hub.node("real")
        assert status is not None
        assert (status.epoch, status.bad_frames, status.gaps) == ("life", 0, 0)
    finally:
        publisher.close()


def test_nodes_and_workers_have_names_of_their_own(line: Line, hub: Hub) -> None:
    with pytest.raises(ValueError, match="a node"):
        hub.watch(SourceSpec("n", "m", "ipc:///x"))
    hub.watch(SourceSpec("w", "m", "ipc:///tmp/hp-nobody"))
    with pytest.raises(ValueError, match="a worker"):
        hub.watch_node(NodeSpec("w", "ipc:///x", "ipc:///y"))
    for bad in ("tcp://*:1", "x", "tcp://h:*"):
        with pytest.raises(ValueError, match="://"):
            hub.watch_node(NodeSpec("m", bad, "ipc:///y"))
        with pytest.raises(ValueError, match="://"):
            hub.watch_node(NodeSpec("m", "ipc:///y", bad))
    assert set(hub.snapshot().nodes) == {"n"}
    assert set(hub.snapshot().sources) == {"w"}
