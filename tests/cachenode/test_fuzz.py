"""Hostile bytes on the control socket: every request is answered, nothing is lost, the node lives."""

import os
import random
import resource
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from cachenode import wire
from cachenode.server import TURN_BYTES, Memory, Server
from cachenode.store import Store
from hotprefix.processes import wait_until
from tests.cachenode.nodes import BLOCK, Node, Raw, ask, client, connect, name
from tests.cachenode.stores import Room, layout, prompt

FRAMES = 6000
"""Mutated or made-up request bodies."""
STREAMS = 300
"""Connections that send bytes which need not even be frames."""
CUTS = 400
"""Sessions whose connection ends at a random byte of random requests."""

_TEXTS = [prompt(seed, 12, 4) for seed in range(6)]


def requests(rng: random.Random) -> wire.Request:
    text = rng.choice(_TEXTS)
    made: list[wire.Request] = [
        text.reserve(rng.randrange(12)),
        text.lease(rng.randrange(12)),
        wire.Commit(1, [rng.randrange(60) for _ in range(rng.randrange(6))]),
        wire.Abort(1, [rng.randrange(60) for _ in range(rng.randrange(6))]),
        wire.Release(1, [rng.randrange(60)]),
        wire.Quiet(1, [name()]),
        wire.Ping(1),
        wire.Write(1, rng.randrange(60), 0, rng.randrange(9000), rng.randbytes(rng.randrange(200))),
        wire.Read(1, rng.randrange(60), 0, 0, rng.randrange(9000), rng.randrange(9000)),
        wire.Forget(1),
    ]
    return rng.choice(made)


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(4)):
        kind, at = rng.randrange(4), rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(8)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(8))
        else:
            del data[at:]
    return bytes(data)


def anything(rng: random.Random) -> bytes:
    """A body: a request, changed or not; values of wrong types; noise."""
    draw = rng.random()
    if draw < 0.6:
        return mutated(rng, msgspec.msgpack.encode(requests(rng)))
    if draw < 0.9:
        tag = rng.choice(["hello", "reserve", "lease", "commit", "write", "read", "quiet", "x", 1, None])
        values = [
            rng.choice([0, -1, 2**64 - 1, 1.5, "x", b"y" * 16, None, [], [1], {"a": 1}]) for _ in range(8)
        ]
        return msgspec.msgpack.encode([tag, *values[: rng.randrange(9)]])
    return rng.randbytes(rng.randrange(1, 40))


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_every_body_gets_one_reply_and_the_node_lives(tmp_path: Path) -> None:
    rng = random.Random(11)
    with Node(tmp_path / "c.sock", blocks=40) as node:
        sent = 0
        while sent < FRAMES:
            raws = [Raw(node.path) for _ in range(3)]
            session = name()
            assert isinstance(raws[0].hello(session, "copy"), wire.Welcome)
            assert isinstance(raws[1].hello(session, "copy", role="worker"), wire.Welcome)
            alive = [True] * 3
            for _ in range(60):
                which = rng.randrange(3)
                if not alive[which]:
                    continue
                body = anything(rng)
                if not body:
                    continue
                raws[which].send(framed(body))
                sent += 1
                reply = raws[which].reply()
                assert reply is not None, "no reply"
                alive[which] = not (isinstance(reply, wire.Failed) and reply.fatal)
            node.check()
            for raw in raws:
                raw.close()
        made = connect(client(node.path))
        assert isinstance(ask(made, made.ping()), wire.Done)
        made.close()
        assert node.server.errors == 0
        assert node.server.sessions.counters["refused"] > FRAMES / 4


def test_streams_of_noise(tmp_path: Path) -> None:
    rng = random.Random(12)
    with Node(tmp_path / "c.sock", blocks=40) as node:
        for _ in range(STREAMS):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(node.path))
                data = rng.randbytes(rng.randrange(1, 400))
                if rng.random() < 0.5:
                    data = b"".join(framed(anything(rng)) for _ in range(5))[: rng.randrange(1, 400)]
                sock.sendall(data)
        made = connect(client(node.path))
        assert isinstance(ask(made, made.ping()), wire.Done)
        made.close()
        node.eventually(lambda: node.server.connections() == 0)


def test_connections_that_end_anywhere(tmp_path: Path) -> None:
    """Sessions with open reservations and leases, cut between any two bytes; both modes. The clients live in
    this process, which maps the arena: only its word (``quiet``) ends a quarantine."""
    rng = random.Random(13)
    with Node(tmp_path / "c.sock", blocks=60) as node:
        cut: list[str] = []
        for number in range(CUTS):
            mode: wire.Mode = rng.choice(["map", "copy"])
            session = name()
            scheduler, worker = Raw(node.path), Raw(node.path)
            assert isinstance(scheduler.hello(session, mode), wire.Welcome)
            assert isinstance(worker.hello(session, mode, role="worker"), wire.Welcome)
            cut += [session] * (mode == "map")
            for _ in range(rng.randrange(4)):
                reply = scheduler.ask(rng.choice([rng.choice(_TEXTS).reserve(), rng.choice(_TEXTS).lease()]))
                if isinstance(reply, wire.Reserved) and rng.random() < 0.5:
                    scheduler.ask(wire.Commit(2, [grant.reservation for grant in reply.grants]))
            data = wire.frame(requests(rng))
            rng.choice([scheduler, worker]).send(data[: rng.randrange(len(data))])
            for raw in rng.sample([scheduler, worker], 2):
                raw.close()
            if number % 10 == 0:
                made = connect(client(node.path))
                for one in cut:
                    made.quiet(one)
                    made.poll()
                cut.clear()
                ask(made, made.ping())
                node.check()
                made.close()
        made = connect(client(node.path))
        for one in cut:
            made.quiet(one)
            made.poll()
        node.eventually(lambda: node.room.store.figures().quarantined == 0)
        figures = node.server.call(node.room.store.figures)
        assert figures.reserved == figures.leased == 0
        assert figures.total == figures.free + figures.used
        assert node.server.call(node.server.sessions.serves) == [("w", layout(BLOCK).fingerprint())]
        made.close()


# ---- what the node gives nobody too much of: waiting requests, unread replies, turns, descriptors ----


def stepped(path: Path) -> tuple[Room, Server]:
    """A node whose turns the test takes."""
    room = Room(64 * BLOCK)
    size = os.fstat(room.directory_fd).st_size
    memory = Memory(room.arena_fd, memoryview(room.arena), room.directory_fd, size)
    return room, Server(path, room.store, memory, node="n", boot="b")


def test_a_client_that_reads_nothing_is_cut_off_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    text = prompt(1, 8)
    of = layout(wire.MAX_COPY // 8)
    with Node(path, blocks=8 * wire.MAX_COPY // BLOCK) as node:
        made, other = connect(client(path, of, "copy")), connect(client(path))
        lazy = Raw(path)
        assert isinstance(lazy.hello(made.session, "copy", role="worker", layout=of), wire.Welcome)
        made.reserve(0, text.keys, text.proofs)
        made.commit([1])
        leased = ask(made, made.lease(0, text.keys, text.proofs))
        assert isinstance(leased, wire.Leased)
        much = b"".join(wire.frame(wire.Read(2, leased.lease, 0, 0, 0, wire.MAX_COPY)) for _ in range(100))
        lazy.send(much)
        node.eventually(lambda: node.server.connections() == 1)
        assert isinstance(ask(other, other.ping()), wire.Done)
        other.close()


def test_requests_wait_in_the_sender_while_some_wait_here(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    room, server = stepped(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.setblocking(False)
        sock.send(wire.frame(wire.Hello(1, wire.VERSION, "scheduler", name(), "w", 0, layout(BLOCK), "map")))
        pings, most = wire.frame(wire.Ping(2)) * 8000, 0
        for _ in range(200):
            for move in (lambda: sock.send(pings), lambda: sock.recv(1 << 20)):
                with suppress(BlockingIOError):
                    move()
            server.step(0.0)
            most = max([most, *(len(one.waiting) for one in server._connections.values())])
        assert 64 < most <= TURN_BYTES // len(wire.frame(wire.Ping(2))) + 1
    server.close()
    room.store.check_integrity()


class Scattered(Store):
    """Whose memory is in so many pieces that no frame names them all."""

    def reserve(self, session: str, ask: wire.Reserve) -> tuple[list[wire.Grant], int, str]:
        grants, admitted, why = super().reserve(session, ask)
        many = [(8192 * at, 4096) for at in range(500_000)]
        return [wire.Grant(one.reservation, one.first, one.blocks, many) for one in grants], admitted, why


def test_an_answer_that_fits_no_frame_ends_its_session_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    room, server = stepped(path)
    room.store.__class__ = Scattered
    thread = threading.Thread(target=server.run)
    thread.start()
    made, other = connect(client(path)), connect(client(path))
    reply = ask(made, made.reserve(0, prompt(1, 4).keys, prompt(1, 4).proofs))
    assert isinstance(reply, wire.Failed)
    assert isinstance(ask(other, other.ping()), wire.Done)
    assert wait_until(lambda: server.call(room.store.figures).free == 64 * BLOCK, 10.0)
    other.close()
    made.close()
    server.stop()
    thread.join()
    server.close()


def test_without_descriptors_it_waits_for_some(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    _, server = stepped(path)
    made = [socket.socket(socket.AF_UNIX) for _ in range(30)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server.step(0.0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard))
        for one in made:
            one.setblocking(False)
            one.connect(str(path))
        server.step(0.0)
        turns, end = server.turns, time.monotonic() + 0.5
        while time.monotonic() < end:
            server.step(0.25)
        assert server.turns - turns < 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def all_taken() -> bool:
        server.step(0.1)
        return server.connections() == 30

    assert wait_until(all_taken, 10.0)
    server.close()
    for one in made:
        one.close()


def test_what_nobody_waits_for_is_not_done_later(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    done: list[int] = []
    with Node(path) as node:
        go, holds = threading.Event(), threading.Event()

        def hold() -> None:
            holds.set()
            go.wait(10.0)

        holder = threading.Thread(target=lambda: node.server.call(hold, 20.0))
        holder.start()
        holds.wait(10.0)
        with pytest.raises(TimeoutError):
            node.server.call(lambda: done.append(1), 0.01)
        go.set()
        holder.join()
        node.server.call(lambda: None)
    assert done == []
