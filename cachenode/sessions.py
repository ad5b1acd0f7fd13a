"""What a connection may ask, in which order, and what becomes of a session when one of its ends is gone.

No sockets: request bodies in, replies out. Every request gets exactly one reply; what is wrong is said in a
``Failed`` and changes nothing. Bounds are checked before any work.
"""

from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from cacheindex.keys import KEY_BYTES
from cachenode import wire
from cachenode.record import PROOF_BYTES, BadLayout, Layout
from cachenode.store import Store

MAX_SESSIONS = 256
"""Open and quarantined ones together."""
MAX_OPEN = 16_384
"""Open reservations, and leases, of one session."""
T = TypeVar("T")

_NAME = (16, 64)
_MAX_TEXT = 1024
_MAX_ENDED = 64


class Peer:
    """One connection. ``session`` is "" until it said hello, and again after its session ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.session = ""
        self.role: wire.Role | None = None
        self.rank = 0


class Answer(msgspec.Struct, frozen=True):
    """``memory``: which descriptors go with the reply."""

    reply: wire.Reply
    memory: Literal["none", "directory", "both"] = "none"


class Moved(msgspec.Struct, frozen=True):
    """Bytes that go through the socket: from these passages into a ``Data``, or ``data`` into them."""

    id: int
    passages: list[tuple[int, int]]
    data: bytes | None


class _Session(msgspec.Struct):
    worker: str
    layout: Layout
    fingerprint: str
    mode: wire.Mode
    scheduler: Peer
    workers: dict[int, Peer] = msgspec.field(default_factory=dict)
    mapping: set[int] = msgspec.field(default_factory=set)
    """Processes that may copy for it."""
    lost: bool = False
    quiet: bool = False
    """Its process said that nothing is copied any more, before we knew that it is lost."""


class _Refused(Exception):
    def __init__(self, code: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.fatal = code, message, fatal


class Sessions:
    """``memory``: bytes of the arena and of the directory. ``counters`` only grow."""

    def __init__(self, store: Store, node: str, boot: str, memory: tuple[int, int]) -> None:
        self._store, self._node, self._boot, self._memory = store, node, boot, memory
        self._sessions: dict[str, _Session] = {}
        self.counters: Counter[str] = Counter()

    # ---- requests ----

    def handle(self, peer: Peer, body: bytes) -> Answer | Moved:
        """The reply to one request, or the copy that comes before it."""
        self.counters["requests"] += 1
        number = -1
        try:
            try:
                ask = wire.request(body)
            except wire.BadFrame as error:
                number = wire.request_id(body)
                raise _Refused(
                    "bad_request", f"this is no request of version {wire.VERSION}: {error}"
                ) from error
            number = ask.id
            if not 0 <= number < 1 << 63:
                number = -1
                raise _Refused("bad_request", "a request's id is a number from 0 to 2**63 - 1")
            if isinstance(ask, wire.Hello):
                return self._hello(peer, ask)
            return self._asked(peer, ask)
        except _Refused as refused:
            self.counters["refused"] += 1
            failed = wire.Failed(number, self._boot, refused.code, refused.message[:_MAX_TEXT], refused.fatal)
            return Answer(failed)

    def _asked(self, peer: Peer, ask: wire.Request) -> Answer | Moved:
        known = self._sessions.get(peer.session)
        if peer.role is None or known is None:
            raise _Refused("no_session", "say hello first, on a new connection", fatal=True)
        if isinstance(ask, wire.Ping):
            return Answer(wire.Done(ask.id, self._boot))
        if isinstance(ask, wire.Quiet):
            self._quiet(peer, ask.ended)
            return Answer(wire.Done(ask.id, self._boot))
        if isinstance(ask, wire.Write | wire.Read):
            return self._copy(peer, known, ask)
        if peer.role != "scheduler":
            raise _Refused("not_yours", "a worker only copies; its scheduler asks for the rest")
        return Answer(self._control(peer.session, ask))

    def _control(self, session: str, ask: wire.Request) -> wire.Reply:
        store, boot = self._store, self._boot
        if isinstance(ask, wire.Reserve | wire.Lease):
            _check_blocks(ask)
        if isinstance(ask, wire.Reserve):
            self._bound(store.open_reservations(session))
            grants, admitted, why = self._tried(lambda: store.reserve(session, ask))
            return wire.Reserved(ask.id, boot, grants, admitted, why)
        if isinstance(ask, wire.Lease):
            self._bound(store.open_leases(session))
            lease, blocks, pieces = self._tried(lambda: store.lease(session, ask))
            return wire.Leased(ask.id, boot, lease, blocks, pieces)
        if isinstance(ask, wire.Commit):
            return wire.Done(ask.id, boot, store.commit(session, _bounded(ask.reservations)))
        if isinstance(ask, wire.Abort):
            return wire.Done(ask.id, boot, store.abort(session, _bounded(ask.reservations)))
        if isinstance(ask, wire.Release):
            return wire.Done(ask.id, boot, store.release(session, _bounded(ask.leases)))
        assert isinstance(ask, wire.Forget)
        return wire.Done(ask.id, boot, store.forget(session))

    def _tried(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except ValueError as error:
            raise _Refused("refused", str(error)) from error

    def _bound(self, opened: int) -> None:
        if opened >= MAX_OPEN:
            raise _Refused("too_many", f"at most {MAX_OPEN} may be open: end some first")

    def _copy(self, peer: Peer, known: _Session, ask: wire.Write | wire.Read) -> Moved:
        if known.mode != "copy" or peer.role != "worker":
            raise _Refused("not_yours", "bytes go through the socket only for workers in copy mode")
        if ask.rank != peer.rank:
            raise _Refused("not_yours", "a worker copies its own rank's bytes")
        length = len(ask.data) if isinstance(ask, wire.Write) else ask.length
        if not 0 < length <= wire.MAX_COPY:
            raise _Refused("bad_request", f"from 1 to {wire.MAX_COPY} bytes are copied at once")
        if isinstance(ask, wire.Write):
            passages, data = self._store.target(peer.session, ask), ask.data
        else:
            passages, data = self._store.source(peer.session, ask), None
        if not passages:
            raise _Refused("not_open", "these bytes are not open for this session")
        return Moved(ask.id, passages, data)

    # ---- the beginning and the end of sessions ----

    def _hello(self, peer: Peer, ask: wire.Hello) -> Answer:
        if peer.role is not None:
            raise _Refused("bad_request", "hello is said once", fatal=True)
        if ask.version != wire.VERSION:
            text = (
                f"this node speaks version {wire.VERSION} of the protocol, not {ask.version}: use its release"
            )
            raise _Refused("version", text, fatal=True)
        try:
            ask.layout.check()
        except BadLayout as error:
            raise _Refused("layout", str(error), fatal=True) from error
        if ask.layout.record_bytes(1) > self._memory[0]:
            text = f"a block of this layout has {ask.layout.record_bytes(1)} bytes, the node's memory fewer"
            raise _Refused("layout", text, fatal=True)
        if not _NAME[0] <= len(ask.session) <= _NAME[1] or len(ask.worker) > _MAX_TEXT:
            text = f"a session's name has {_NAME[0]} to {_NAME[1]} characters, a worker's at most {_MAX_TEXT}"
            raise _Refused("bad_request", text, fatal=True)
        self._quiet(peer, ask.ended)
        known = self._open(peer, ask) if ask.role == "scheduler" else self._join(peer, ask)
        peer.role, peer.session, peer.rank = ask.role, ask.session, ask.rank
        arena, directory = self._memory
        size = directory if ask.role == "scheduler" else arena
        welcome = wire.Welcome(ask.id, self._boot, self._node, known.fingerprint, known.mode, size, directory)
        maps = ask.role == "worker" and known.mode == "map"
        return Answer(welcome, "both" if maps else "directory")

    def _open(self, peer: Peer, ask: wire.Hello) -> _Session:
        if ask.session in self._sessions:
            raise _Refused("taken", "this session's name is taken: choose a new one", fatal=True)
        if len(self._sessions) >= MAX_SESSIONS:
            raise _Refused("too_many", f"at most {MAX_SESSIONS} sessions are kept", fatal=True)
        fingerprint = self._store.open(ask.session, ask.layout, ask.mode)
        known = _Session(ask.worker, ask.layout, fingerprint, ask.mode, peer)
        self._sessions[ask.session] = known
        self.counters["sessions"] += 1
        return known

    def _join(self, peer: Peer, ask: wire.Hello) -> _Session:
        known = self._sessions.get(ask.session)
        if known is None or known.lost:
            raise _Refused(
                "no_session", "there is no such session; its scheduler says hello first", fatal=True
            )
        if known.layout != ask.layout or known.mode != ask.mode:
            raise _Refused("layout", "worker and scheduler differ in layout or mode", fatal=True)
        if not 0 <= ask.rank < known.layout.ranks or ask.rank in known.workers:
            raise _Refused("rank", f"rank {ask.rank} is taken or not below {known.layout.ranks}", fatal=True)
        if known.mode == "map" and peer.pid <= 0:
            text = "the node cannot see this process: share process ids with it, or use mode copy"
            raise _Refused("unseen", text, fatal=True)
        known.workers[ask.rank] = peer
        if known.mode == "map":
            known.mapping.add(peer.pid)
        return known

    def gone(self, peer: Peer) -> list[Peer]:
        """A connection ended. Its session ends with it; the session's other connections, to be closed."""
        session, peer.session = peer.session, ""
        known = self._sessions.get(session)
        if known is None or known.lost:
            return []
        known.lost = True
        if not self._store.open_reservations(session) and not self._store.open_leases(session):
            known.mapping.clear()  # There is nothing that anybody could be copying.
        if known.quiet:
            known.mapping.clear()
        self._store.lost(session)
        self.counters["sessions_lost"] += 1
        self._settle(session, known)
        others = [other for other in (known.scheduler, *known.workers.values()) if other is not peer]
        for other in others:
            other.session = ""
        return others

    def exited(self, pid: int) -> None:
        """A process is gone, and with it its copies."""
        for session, known in list(self._sessions.items()):
            if pid in known.mapping:
                known.mapping.discard(pid)
                self._settle(session, known)

    def _quiet(self, peer: Peer, ended: list[str]) -> None:
        """A process says that it copies nothing for these sessions; a scheduler says so for its workers."""
        if len(ended) > _MAX_ENDED:
            raise _Refused("bad_request", f"at most {_MAX_ENDED} ended sessions are named", fatal=True)
        for session in ended:
            known = self._sessions.get(session)
            if known is None or session == peer.session:
                continue
            if not known.lost:
                # Its end has come too, behind requests that we did not read yet.
                known.quiet = known.quiet or peer.pid == known.scheduler.pid
                continue
            if peer.pid == known.scheduler.pid:
                known.mapping.clear()
            known.mapping.discard(peer.pid)
            self._settle(session, known)

    def _settle(self, session: str, known: _Session) -> None:
        if known.lost and not known.mapping:
            del self._sessions[session]
            self._store.settled(session)

    # ---- for others ----

    @property
    def mapping(self) -> set[int]:
        """Processes whose end matters to a session."""
        return {pid for known in self._sessions.values() for pid in known.mapping}

    def serves(self) -> list[tuple[str, str]]:
        """(worker, layout's fingerprint) of every open session."""
        return sorted({(one.worker, one.fingerprint) for one in self._sessions.values() if not one.lost})

    def counts(self) -> tuple[int, int]:
        """How many sessions are open, and how many are quarantined."""
        lost = sum(known.lost for known in self._sessions.values())
        return len(self._sessions) - lost, lost


def _check_blocks(ask: wire.Reserve | wire.Lease) -> None:
    blocks = len(ask.keys) // KEY_BYTES
    if not 0 < blocks <= wire.MAX_BLOCKS or len(ask.keys) % KEY_BYTES:
        raise _Refused(
            "bad_request", f"keys are {KEY_BYTES} bytes a block, for 1 to {wire.MAX_BLOCKS} blocks"
        )
    if len(ask.proofs) != blocks * PROOF_BYTES:
        raise _Refused("bad_request", f"proofs are {PROOF_BYTES} bytes a block, one for each key")
    if not 0 <= ask.first < 1 << 40 or not 0 <= ask.skip < blocks or len(ask.adapter) > _MAX_TEXT:
        raise _Refused("bad_request", "first, skip or adapter is out of bounds")
    if isinstance(ask, wire.Reserve) and len(ask.parent) != (KEY_BYTES if ask.first else 0):
        raise _Refused("bad_request", "parent is the key of the block before the first, where there is one")


def _bounded(numbers: list[int]) -> list[int]:
    if len(numbers) > wire.MAX_IDS:
        raise _Refused("bad_request", f"at most {wire.MAX_IDS} are named at once")
    return numbers
