"""Events over real sockets: they arrive, questions are answered, nobody can hold the node up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from cacheindex.events import Replay, Snapshot, decode_batch, encode
from cachenode import publisher
from cachenode.journal import Journal
from cachenode.publisher import Publisher
from hotprefix.processes import wait_until


class Scene:
    def __init__(self, folder: Path) -> None:
        self.journal = Journal("n", "life", lambda: iter([("one", 32, b"k" * 16)] * 3))
        self.events, self.replay = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self.publisher = Publisher(self.journal, self.events, self.replay)
        self.context: zmq.Context[Any] = zmq.Context()
        self.sockets: list[Any] = []
        self.now = 0.0

    def socket(self, kind: int, endpoint: str) -> Any:
        made = self.context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(endpoint)
        self.sockets.append(made)
        return made

    def turn(self) -> bool:
        self.now += 0.3
        return self.publisher.turn(self.now, lambda: (5, [("w", "one")]))

    def answers(self, dealer: Any) -> list[bytes]:
        found: list[bytes] = []

        def ended() -> bool:
            self.turn()
            while dealer.poll(0):
                empty, part = dealer.recv_multipart()
                assert empty == b""
                if not part:
                    return True
                found.append(part)
            return False

        assert wait_until(ended, 10.0)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for opened in made.sockets:
        opened.close(linger=0)
    made.context.term()
    made.publisher.close()


def test_events_arrive_under_the_node_s_name(scene: Scene) -> None:
    sub = scene.socket(zmq.SUB, scene.events)
    sub.setsockopt(zmq.SUBSCRIBE, b"n")

    def heard() -> bool:
        scene.turn()
        return bool(sub.poll(10))

    assert wait_until(heard, 10.0)
    topic, data = sub.recv_multipart()
    assert topic == b"n"
    assert decode_batch(data).source == "n"


def test_questions_are_answered(scene: Scene) -> None:
    scene.turn()
    dealer = scene.socket(zmq.DEALER, scene.replay)
    dealer.send_multipart([b"", encode(Replay(0))])
    assert [decode_batch(part).seq for part in scene.answers(dealer)][:1] == [0]
    dealer.send_multipart([b"", encode(Snapshot())])
    (part,) = scene.answers(dealer)
    assert decode_batch(part).events[0].keys == b"k" * 48  # type: ignore[union-attr]


def test_garbage_is_counted_and_ignored(scene: Scene) -> None:
    dealer = scene.socket(zmq.DEALER, scene.replay)
    for frames in ([b""], [b"x"], [b"", b"\xc1"], [b"a", b"b", b"c", b"d"], [b"", b""]):
        dealer.send_multipart(frames)
    dealer.send_multipart([b"", encode(Snapshot())])
    assert len(scene.answers(dealer)) == 1
    assert scene.publisher.counters["bad_questions"] == 5


def test_askers_who_take_nothing_cost_nothing(scene: Scene) -> None:
    """Many questions of one peer that reads no answer, then gone: the node goes on."""
    lazy = scene.socket(zmq.DEALER, scene.replay)
    for _ in range(200):
        lazy.send_multipart([b"", encode(Snapshot())])
    assert wait_until(lambda: not scene.turn() and scene.publisher.counters["questions"] > 20, 10.0)
    lazy.close()
    other = scene.socket(zmq.DEALER, scene.replay)
    other.send_multipart([b"", encode(Snapshot())])
    assert scene.answers(other)


def test_addresses(tmp_path: Path) -> None:
    for bad in ("tcp://0.0.0.0:1", "tcp://*:1", "udp://x:1", "ipc://", "tcp://127.0.0.1:x", "nonsense"):
        with pytest.raises(ValueError, match="://"):
            publisher.check_address(bad, remote=False)
    publisher.check_address("tcp://0.0.0.0:1", remote=True)
    publisher.check_address("tcp://[::1]:1", remote=False)
    with pytest.raises(OSError, match="cannot be published"):
        Publisher(Journal("n", "life"), f"ipc://{tmp_path}/none/e", f"ipc://{tmp_path}/r")
