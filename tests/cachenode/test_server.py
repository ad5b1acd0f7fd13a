"""The control socket: who may say what, what is answered, and that the node outlives everybody."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cachenode import unix_path, wire
from hotprefix.processes import wait_until
from tests.cachenode.nodes import BLOCK, Node, Raw, ask, attach, client, connect, name
from tests.cachenode.stores import layout, prompt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node" / "control.sock"


def test_a_store_and_a_load_through_the_socket(path: Path) -> None:
    text = prompt(1, 12)
    with Node(path) as node:
        one, two = connect(client(path)), connect(client(path))
        worker = attach(one, path)
        reserve, lease = text.reserve(), text.lease()
        reply = ask(one, one.reserve(0, reserve.keys, reserve.proofs))
        assert isinstance(reply, wire.Reserved)
        for grant in reply.grants:
            for offset, length in grant.passages:
                assert worker.arena is not None
                worker.arena[offset : offset + length] = grant.first + 1
        assert one.match("", text.keys, text.proofs) == 0
        done = ask(one, one.commit([grant.reservation for grant in reply.grants]))
        assert isinstance(done, wire.Done)
        assert done.count == 2
        assert two.match("", text.keys, text.proofs) == 12
        assert two.match("adapter", text.keys, text.proofs) == 0
        leased = ask(two, two.lease(0, lease.keys, lease.proofs))
        assert isinstance(leased, wire.Leased)
        reader = attach(two, path)
        for piece in leased.pieces:
            assert reader.arena is not None
            assert all((reader.arena[o : o + n] == piece.first + 1).all() for o, n in piece.passages)
            assert reader.valid(piece.slot, piece.generation)
            assert not reader.valid(piece.slot, piece.generation + 2)
        assert ask(two, two.release([leased.lease])) == wire.Done(ask(two, two.ping()).id - 1, "boot-1", 1)
        assert node.server.sessions.serves() == [("w", layout(BLOCK).fingerprint())]
        for made in (one, two):
            made.close()
        for joined in (worker, reader):
            joined.close()


def test_the_directory_is_read_only_for_clients(path: Path) -> None:
    """``seal`` is the node's; here: what a client maps it cannot write."""
    with Node(path):
        made = connect(client(path))
        view = made._view
        assert view is not None
        with pytest.raises(TypeError):
            view._buffer[0] = 1
        made.close()


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_frames_that_are_none(path: Path, data: bytes) -> None:
    with Node(path):
        raw = Raw(path)
        raw.send(data)
        reply = raw.reply()
        assert isinstance(reply, wire.Failed)
        assert reply.id == -1
        assert reply.fatal == (data[:1] != b"\x01")
        assert not reply.fatal or raw.reply() is None


def test_requests_in_the_wrong_place(path: Path) -> None:
    text = prompt(1, 4).reserve()
    with Node(path):
        early = Raw(path)
        reply = early.ask(text)
        assert isinstance(reply, wire.Failed)
        assert (reply.code, reply.fatal) == ("no_session", True)
        session = name()
        scheduler, worker = Raw(path), Raw(path)
        assert isinstance(scheduler.hello(session), wire.Welcome)
        assert isinstance(worker.hello(session, role="worker"), wire.Welcome)
        for raw, request, code in [
            (worker, text, "not_yours"),
            (worker, wire.Write(2, 1, 0, 0, b"x"), "not_yours"),
            (scheduler, wire.Read(3, 1, 0, 0, 0, 1), "not_yours"),
            (scheduler, msgspec.structs.replace(text, keys=text.keys[:-1]), "bad_request"),
            (scheduler, msgspec.structs.replace(text, keys=b""), "bad_request"),
            (scheduler, msgspec.structs.replace(text, proofs=b""), "bad_request"),
            (scheduler, msgspec.structs.replace(text, skip=4), "bad_request"),
            (scheduler, msgspec.structs.replace(text, first=-1), "bad_request"),
            (scheduler, msgspec.structs.replace(text, first=1), "bad_request"),
            (scheduler, msgspec.structs.replace(text, parent=b"x" * 16), "bad_request"),
            (scheduler, msgspec.structs.replace(text, adapter="x" * 2000), "bad_request"),
            (scheduler, wire.Commit(9, [0] * (wire.MAX_IDS + 1)), "bad_request"),
            (scheduler, msgspec.structs.replace(text, id=-5), "bad_request"),
        ]:
            reply = raw.ask(request)
            assert isinstance(reply, wire.Failed), request
            assert (reply.code, reply.fatal) == (code, False), reply
        assert isinstance(scheduler.ask(wire.Ping(7)), wire.Done)
        again = scheduler.hello(name())
        assert isinstance(again, wire.Failed)
        assert again.fatal


def test_hellos_that_are_refused(path: Path) -> None:
    session = name()
    with Node(path):
        first = Raw(path)
        assert isinstance(first.hello(session), wire.Welcome)
        bad = msgspec.structs.replace(layout(BLOCK), layers=0)
        for changes, code in [
            ({"version": 99}, "version"),
            ({"session": "short"}, "bad_request"),
            ({"session": session}, "taken"),
            ({"layout": bad}, "layout"),
            ({"layout": msgspec.structs.replace(layout(BLOCK), block_tokens=40)}, "layout"),
            ({"session": session, "role": "worker", "rank": 1}, "rank"),
            ({"session": session, "role": "worker", "layout": layout(2 * BLOCK)}, "layout"),
            ({"session": session, "role": "worker", "mode": "copy"}, "layout"),
            ({"session": name(), "role": "worker"}, "no_session"),
            ({"ended": ["x"] * 100}, "bad_request"),
        ]:
            raw = Raw(path)
            reply = raw.hello(**{"session": name(), **changes})  # type: ignore[arg-type]
            assert isinstance(reply, wire.Failed), changes
            assert (reply.code, reply.fatal) == (code, True), reply
            assert raw.reply() is None


def test_copies_through_the_socket(path: Path) -> None:
    of = layout(BLOCK, ranks=2)
    text = prompt(1, 3)
    with Node(path) as node:
        made = connect(client(path, of, "copy"))
        workers = [attach(made, path, rank, of, "copy") for rank in (0, 1)]
        assert all(worker.arena is None for worker in workers)
        reply = ask(made, made.reserve(0, text.keys, text.proofs))
        assert isinstance(reply, wire.Reserved)
        number = reply.grants[0].reservation
        for rank, worker in enumerate(workers):
            assert worker.write(number, rank, 0, bytes([rank + 1]) * BLOCK * 3)
            assert not worker.write(number, 1 - rank, 0, b"x")
            assert not worker.write(number, rank, 3 * BLOCK, b"x")
        made.commit([number])
        leased = ask(made, made.lease(0, text.keys, text.proofs))
        assert isinstance(leased, wire.Leased)
        for rank, worker in enumerate(workers):
            assert worker.read(leased.lease, 0, rank, BLOCK, 2 * BLOCK) == bytes([rank + 1]) * BLOCK * 2
            assert worker.read(leased.lease, 0, rank, BLOCK, 2 * BLOCK + 1) is None
        made.close()
        node.eventually(lambda: node.room.store.figures().quarantined == 0)
        assert not workers[0].alive() or wait_until(lambda: not workers[0].alive(), 10.0)


def test_a_client_without_a_node_and_one_that_comes_back(path: Path) -> None:
    made = client(path)
    assert made.poll() == []
    assert made.match("", b"x" * 16, b"x" * 32) == 0
    assert made.reserve(0, b"x" * 16, b"x" * 32) is None
    with Node(path, boot="boot-1"):
        connect(made)
        first = made.session
        assert made.boot == "boot-1"
    ticket = made.ping()
    if ticket is not None:
        lost = made.wait(ticket, 10.0)
        assert isinstance(lost, wire.Failed)
        assert lost.code == "lost"
    made.poll()
    assert made.session == ""
    with Node(path, boot="boot-2") as node:
        connect(made)
        assert made.boot == "boot-2"
        assert made.session not in ("", first)
        assert node.room.store.figures().records == 0
        made.close()


def test_one_path_one_node(path: Path) -> None:
    with Node(path):
        with pytest.raises(ValueError, match="a node is running on"):
            unix_path.listen(path)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with Node(path):
        pass
    path.write_text("precious")
    with pytest.raises(ValueError, match="is no socket"):
        unix_path.listen(path)
    with pytest.raises(ValueError, match="longer than"):
        unix_path.listen(path.parent / ("x" * 120))
    assert path.read_text() == "precious"


WORKER = """
import sys
from tests.cachenode.stores import layout
from cachenode.attachment import Attachment
joined = Attachment.join(sys.argv[1], layout(4096), "w", sys.argv[2])
assert joined is not None
print("joined", flush=True)
sys.stdin.read()
"""


def worker_process(path: Path, session: str) -> "subprocess.Popen[str]":
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "joined\n"
    return child


def test_space_of_a_live_worker_is_quarantined_until_it_exits(path: Path) -> None:
    """Its scheduler's socket is cut; the worker may go on copying for as long as it lives."""
    text = prompt(1, 16)
    with Node(path) as node:
        made = connect(client(path))
        child = worker_process(path, made.session)
        made.reserve(0, text.keys, text.proofs)
        node.eventually(lambda: node.room.store.figures().reservations == 2)
        made.close()
        node.eventually(lambda: node.room.store.figures().quarantined == 16 * BLOCK)
        node.check()
        child.send_signal(signal.SIGKILL)
        node.eventually(lambda: node.room.store.figures().free == 64 * BLOCK)
        child.communicate()


@pytest.mark.parametrize("late", [False, True])
def test_or_until_its_scheduler_says_that_nobody_copies(path: Path, late: bool) -> None:
    text = prompt(1, 16)
    with Node(path) as node:
        made = connect(client(path))
        child = worker_process(path, made.session)
        session = made.session
        made.reserve(0, text.keys, text.proofs)
        node.eventually(lambda: node.room.store.figures().reservations == 2)
        made._lose()
        node.eventually(lambda: node.room.store.figures().quarantined == 16 * BLOCK)
        if late:
            connect(made)
            node.check()
            assert node.server.call(node.room.store.figures).quarantined == 16 * BLOCK
        made.quiet(session)
        connect(made)
        made.poll()
        node.eventually(lambda: node.room.store.figures().free == 64 * BLOCK)
        made.close()
        child.communicate()


def test_a_stranger_cannot_end_the_quarantine(path: Path) -> None:
    text = prompt(1, 16)
    with Node(path) as node:
        made = connect(client(path))
        session = made.session
        child = worker_process(path, session)
        stranger = worker_stranger(path, session)
        made.reserve(0, text.keys, text.proofs)
        node.eventually(lambda: node.room.store.figures().reservations == 2)
        made.close()
        node.eventually(lambda: node.room.store.figures().quarantined == 16 * BLOCK)
        assert stranger.stdin is not None
        stranger.stdin.write("go\n")
        stranger.stdin.flush()
        stranger.communicate()
        assert node.server.call(node.room.store.figures).quarantined == 16 * BLOCK
        child.kill()
        child.communicate()


STRANGER = """
import sys
from tests.cachenode.nodes import Raw, name
from pathlib import Path
sys.stdin.readline()
raw = Raw(Path(sys.argv[1]))
raw.hello(name(), ended=[sys.argv[2]])
"""


def worker_stranger(path: Path, session: str) -> "subprocess.Popen[str]":
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(path), session],
        stdin=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_call_runs_in_the_owner_thread_and_raises_there(path: Path) -> None:
    with Node(path) as node:
        assert node.server.call(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            node.server.call(lambda: 1 // 0)
        assert node.server.connections() == 0
