"""Clients of a node that is absent, silent, replaced or hostile: never in the engine's way."""

import os
import random
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachenode import shared, wire
from cachenode.attachment import Attachment
from cachenode.client import MAX_UNSENT, NodeClient
from hotprefix.processes import wait_until
from tests.cachenode.nodes import BLOCK, Node, attach, client, connect
from tests.cachenode.stores import Room, layout, prompt

REPLIES = 1500
"""Mutated replies that a client reads."""


class FakeNode:
    """Listens, and says what it is told to; a real directory is at hand. ``now`` is its clients' clock."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 100.0
        self.room = Room(16 * BLOCK)
        self.size = os.fstat(self.room.directory_fd).st_size
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.names = 0

    def client(self, jitter: float = 1.0) -> NodeClient:
        return NodeClient(
            str(self.path), layout(BLOCK), "w", self._name, lambda: self.now, jitter=lambda: jitter
        )

    def _name(self) -> str:
        self.names += 1
        return f"session-number-{self.names}"

    def accept(self) -> tuple[socket.socket, wire.Hello]:
        sock, _ = self._listener.accept()
        sock.settimeout(10.0)
        (hello,) = self.heard(sock)
        assert isinstance(hello, wire.Hello)
        return sock, hello

    def heard(self, sock: socket.socket) -> list[wire.Request]:
        return [wire.request(body) for body in wire.Frames().feed(sock.recv(1 << 16))]

    def welcome(self, sock: socket.socket, fd: int | None = None, **changes: object) -> None:
        fields: dict[str, object] = {"fingerprint": layout(BLOCK).fingerprint(), "mode": "map", "boot": "b"}
        fields |= {"id": 1, "node": "n", "bytes": self.size, "directory_bytes": self.size, **changes}
        reply = wire.Welcome(**fields)  # type: ignore[arg-type]
        socket.send_fds(sock, [wire.frame(reply)], [self.room.directory_fd if fd is None else fd])

    def open(self, made: NodeClient) -> tuple[socket.socket, wire.Hello]:
        made.poll()
        sock, hello = self.accept()
        self.welcome(sock)
        made.poll()
        assert made.connected
        return sock, hello

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNode]:
    node = FakeNode(tmp_path / "c.sock")
    yield node
    node.close()


def test_what_was_asked_is_lost_with_the_connection_and_said_once(fake: FakeNode) -> None:
    made = fake.client()
    sock, _ = fake.open(made)
    first, second = made.ping(), made.ping()
    sock.close()
    assert first is not None
    lost = made.wait(first, 5.0)
    assert isinstance(lost, wire.Failed)
    assert lost.code == "lost"
    fake.now += 60.0  # Long after it is time to connect again: the second's end is told nevertheless.
    assert [reply.id for reply in made.poll()] == [second]
    assert not select.select([fake._listener], [], [], 0)[0], "one poll, replies of two connections"
    assert made.poll() == []
    _, hello = fake.accept()
    assert hello.session == "session-number-2"


def test_pauses_grow_between_attempts_up_to_a_bound(tmp_path: Path) -> None:
    fake = FakeNode(tmp_path / "c.sock")
    made, pauses, last = fake.client(), [], fake.now
    for _ in range(12):
        made.poll()
        sock, _ = fake.accept()
        pauses.append(fake.now - last)
        last = fake.now
        sock.close()
        made.poll()
        assert not made.connected
        fake.now = made._retry_at - 0.001
        made.poll()
        assert not select.select([fake._listener], [], [], 0)[0], "too early"
        fake.now = made._retry_at
    assert pauses[1:4] == pytest.approx([0.1, 0.2, 0.4])
    assert pauses[-1] == pytest.approx(5.0)
    made.close()
    fake.now += 1000.0
    made.poll()
    assert not select.select([fake._listener], [], [], 0)[0], "closed, and connects"
    fake.close()


def test_ended_is_said_only_when_told_and_until_it_is_heard(fake: FakeNode) -> None:
    made = fake.client()
    sock, hello = fake.open(made)
    sock.close()
    made.poll()
    fake.now += 60.0
    sock, again = fake.open(made)
    assert again.ended == []
    made.quiet(hello.session)
    made._unsent += bytes(2 * MAX_UNSENT)  # Nothing more can be sent now: it is said later.
    made.poll()
    sock.close()
    made.poll()
    fake.now += 60.0
    made.poll()
    assert fake.accept()[1].ended == [hello.session]


def test_a_silent_node_is_given_up_and_one_that_does_not_read_takes_no_memory(fake: FakeNode) -> None:
    made = fake.client()
    made.poll()
    silent, _ = fake.accept()
    fake.now += 11.0
    made.poll()
    assert made.session == ""
    fake.now += 60.0
    deaf, _ = fake.open(made)
    text = prompt(1, 200)
    tickets = [made.reserve(0, text.keys, text.proofs) for _ in range(2000)]
    assert tickets[0] is not None
    assert tickets[-1] is None
    assert len(made._unsent) < MAX_UNSENT + (1 << 16)
    for sock in (silent, deaf):
        sock.close()
    made.close()


@pytest.mark.parametrize("size", [-1, 0, 8, 1 << 62])
def test_welcomes_of_no_directory(fake: FakeNode, size: int) -> None:
    made = fake.client()
    before = len(os.listdir("/proc/self/fd"))
    made.poll()
    sock, _ = fake.accept()
    fake.welcome(sock, directory_bytes=size)
    assert made.poll() == []
    assert not made.connected
    sock.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["not a directory", "another layout"])
def test_welcomes_that_do_not_fit(fake: FakeNode, kind: str) -> None:
    """The descriptor is closed once: what got its number meanwhile stays open."""
    made = fake.client()
    made.poll()
    sock, _ = fake.accept()
    fd = shared.memory_file("noise", fake.size)
    if kind == "another layout":
        fake.welcome(sock, fingerprint="x")
    else:
        fake.welcome(sock, fd)
    before = len(os.listdir("/proc/self/fd"))
    assert made.poll() == []
    assert not made.connected
    assert len(os.listdir("/proc/self/fd")) == before - 1  # Its own socket, and nothing else.
    os.close(fd)


def test_replies_of_any_kind(fake: FakeNode) -> None:
    rng = random.Random(3)
    made = fake.client()
    sock: socket.socket | None = None
    for _ in range(REPLIES):
        if sock is None or not made.connected:
            fake.now += 60.0
            made.poll()
            sock, _ = fake.open(made)
        text = prompt(1, 2)
        ticket = made.reserve(0, text.keys, text.proofs) or 0
        data = bytearray(wire.frame(wire.Reserved(ticket, "b", [wire.Grant(1, 0, 2, [(0, 8)])], 2)))
        for _ in range(rng.randrange(3)):
            data[rng.randrange(4, len(data))] = rng.randrange(256)
        sock.sendall(data if rng.random() < 0.9 else rng.randbytes(20))
        for reply in made.poll():
            assert isinstance(reply, wire.Reserved | wire.Failed | wire.Done | wire.Leased | wire.Data)
        made.match("", text.keys, text.proofs)
    made.close()


def test_alive_asks_nobody_and_waits_for_nobody(tmp_path: Path) -> None:
    with Node(tmp_path / "c.sock") as node:
        made = connect(client(node.path))
        worker = attach(made, node.path)
        assert worker.alive()
        with worker._lock:
            assert worker.alive(), "another thread is in the middle of a copy"
        made.close()
        assert wait_until(lambda: not worker.alive(), 10.0)
        worker.close()
        assert not worker.alive()


def test_alive_does_not_wait_at_all() -> None:
    """The socket has a timeout; ``recv`` would wait for it in spite of MSG_DONTWAIT."""
    ours, theirs = socket.socketpair()
    ours.settimeout(600.0)
    room = Room(16 * BLOCK)
    welcome = wire.Welcome(1, "b", "n", "f", "copy", 1, 1)
    worker = Attachment(ours, welcome, None, room.view)
    assert worker.alive()
    theirs.close()
    assert not worker.alive()
    worker.close()
