"""Sessions without sockets: who may map, and when what they may be copying is free again."""

import msgspec
import pytest

from cachenode import sessions, wire
from cachenode.sessions import Answer, Moved, Peer, Sessions
from tests.cachenode.stores import Room, layout, prompt

BLOCK = 4096
BLOCKS = 32
ENGINE, WORKER, STRANGER = 100, 101, 999


class Hall:
    """Sessions over a real store."""

    def __init__(self) -> None:
        self.room = Room(BLOCKS * BLOCK)
        self.sessions = Sessions(self.room.store, "n", "b", (BLOCKS * BLOCK, 1))

    def ask(self, peer: Peer, request: wire.Request) -> wire.Reply:
        answer = self.sessions.handle(peer, msgspec.msgpack.encode(request))
        assert isinstance(answer, Answer)
        self.room.store.check_integrity()
        return answer.reply

    def hello(
        self,
        pid: int,
        session: str = "s" * 16,
        role: wire.Role = "scheduler",
        mode: wire.Mode = "map",
        ended: list[str] | None = None,
    ) -> tuple[Peer, wire.Reply]:
        peer = Peer(pid)
        hello = wire.Hello(1, wire.VERSION, role, session, "w", 0, layout(BLOCK), mode, ended or [])
        return peer, self.ask(peer, hello)

    def reserving(self, mode: wire.Mode = "map") -> tuple[Peer, Peer]:
        """A scheduler and a worker with an open reservation of 8 blocks."""
        scheduler, _ = self.hello(ENGINE, mode=mode)
        worker, welcome = self.hello(WORKER, role="worker", mode=mode)
        assert isinstance(welcome, wire.Welcome)
        assert isinstance(self.ask(scheduler, prompt(1, 8).reserve()), wire.Reserved)
        return scheduler, worker

    @property
    def quarantined(self) -> int:
        return self.room.store.figures().quarantined // BLOCK

    @property
    def free(self) -> int:
        return self.room.store.figures().free // BLOCK


def code(reply: wire.Reply) -> str:
    assert isinstance(reply, wire.Failed)
    return reply.code


def test_who_cannot_be_watched_maps_nothing_and_ends_no_session() -> None:
    hall = Hall()
    scheduler, _ = hall.hello(ENGINE)
    worker, reply = hall.hello(0, role="worker")
    assert code(reply) == "unseen"
    assert hall.sessions.gone(worker) == []
    assert hall.sessions.mapping == set()
    assert isinstance(hall.ask(scheduler, wire.Ping(2)), wire.Done)
    assert isinstance(hall.hello(WORKER, role="worker")[1], wire.Welcome)
    other = "t" * 16
    hall.hello(ENGINE, other, mode="copy")
    assert isinstance(hall.hello(0, other, "worker", "copy")[1], wire.Welcome)
    assert hall.sessions.mapping == {WORKER}


def test_a_quarantine_ends_with_the_process_that_maps() -> None:
    hall = Hall()
    scheduler, worker = hall.reserving()
    assert hall.sessions.gone(scheduler) == [worker]
    hall.sessions.exited(ENGINE)
    assert (hall.quarantined, hall.free) == (8, BLOCKS - 8)
    hall.sessions.exited(WORKER)
    assert (hall.quarantined, hall.free) == (0, BLOCKS)
    assert hall.sessions.counts() == (0, 0)


def test_only_its_own_processes_end_a_quarantine() -> None:
    hall = Hall()
    scheduler, _ = hall.reserving()
    hall.sessions.gone(scheduler)
    hall.hello(STRANGER, "t" * 16, ended=["s" * 16])
    assert hall.quarantined == 8
    hall.hello(ENGINE, "u" * 16, ended=["s" * 16])
    assert hall.quarantined == 0


@pytest.mark.parametrize(("pid", "left"), [(ENGINE, 0), (STRANGER, 8)])
def test_ended_may_be_said_before_the_end_is_seen(pid: int, left: int) -> None:
    """The old connection may end behind requests that were not read yet."""
    hall = Hall()
    scheduler, _ = hall.reserving()
    hall.hello(pid, "t" * 16, ended=["s" * 16])
    assert hall.room.store.figures().reserved == 8 * BLOCK
    hall.sessions.gone(scheduler)
    assert hall.quarantined == left


def test_a_session_cannot_say_that_itself_has_ended() -> None:
    hall = Hall()
    scheduler, _ = hall.reserving()
    hall.ask(scheduler, wire.Quiet(3, ["s" * 16]))
    hall.sessions.gone(scheduler)
    assert hall.quarantined == 8


def test_nothing_open_and_nothing_mapped_need_no_quarantine() -> None:
    hall = Hall()
    scheduler, _ = hall.hello(ENGINE)
    hall.hello(WORKER, role="worker")
    hall.sessions.gone(scheduler)
    assert hall.sessions.counts() == (0, 0)
    scheduler, _ = hall.reserving("copy")
    hall.sessions.gone(scheduler)
    assert (hall.quarantined, hall.free) == (0, BLOCKS)


def test_bounds_on_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall()
    scheduler, worker = hall.reserving()
    monkeypatch.setattr(sessions, "MAX_OPEN", 1)
    assert code(hall.ask(scheduler, prompt(2, 8).reserve())) == "too_many"
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
    assert code(hall.hello(STRANGER, "t" * 16)[1]) == "too_many"
    hall.sessions.gone(worker)
    assert code(hall.hello(STRANGER, "t" * 16)[1]) == "too_many", "a quarantined session counts"
    hall.sessions.exited(WORKER)
    assert isinstance(hall.hello(STRANGER, "t" * 16)[1], wire.Welcome)


def test_copies_are_bounded_and_for_copy_mode() -> None:
    hall = Hall()
    scheduler, worker = hall.reserving("copy")
    for request in (wire.Write(2, 1, 0, 0, b""), wire.Write(3, 1, 0, 0, bytes(wire.MAX_COPY + 1))):
        assert code(hall.ask(worker, request)) == "bad_request"
    assert code(hall.ask(worker, wire.Write(4, 1, 0, 8 * BLOCK - 1, b"xy"))) == "not_open"
    assert code(hall.ask(scheduler, wire.Write(5, 1, 0, 0, b"x"))) == "not_yours"
    good = msgspec.msgpack.encode(wire.Write(6, 1, 0, 8 * BLOCK - 1, b"x"))
    assert isinstance(hall.sessions.handle(worker, good), Moved)
