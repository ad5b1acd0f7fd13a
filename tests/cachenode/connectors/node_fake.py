"""A node in memory for the connector's tests: one session, answers when told to, space without end."""

from collections import deque

from cachenode.record import PROOF_BYTES
from cachenode.wire import Done, Failed, Grant, Leased, Piece, Reply, Reserved

KEY = 16


class FakeNode:
    """Keeps keys only. ``silent``: answers wait until ``speak``. ``room``: how many blocks still fit."""

    def __init__(self) -> None:
        self.session = "s1"
        self.silent = False
        self.room = 10_000
        self.held: dict[tuple[str, bytes, bytes], int] = {}
        self.open: dict[int, list[tuple[str, bytes, bytes]]] = {}
        self.leases: set[int] = set()
        self.quieted: list[str] = []
        self.committed: list[int] = []
        self.aborted: list[int] = []
        self.asked: list[tuple[str, int, int]] = []
        self._replies: deque[Reply] = deque()
        self._waiting: deque[Reply] = deque()
        self._ids = 0

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def _names(self, adapter: str, keys: bytes, proofs: bytes) -> list[tuple[str, bytes, bytes]]:
        count = len(keys) // KEY
        assert len(keys) == KEY * count
        assert len(proofs) == PROOF_BYTES * count
        return [
            (adapter, keys[i * KEY :][:KEY], proofs[i * PROOF_BYTES :][:PROOF_BYTES]) for i in range(count)
        ]

    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int:
        names = self._names(adapter, keys, proofs)
        self.asked.append(("match", 0, len(names)))
        return next((i for i, name in enumerate(names) if name not in self.held), len(names))

    def reserve(
        self,
        first: int,
        keys: bytes,
        proofs: bytes,
        adapter: str = "",
        parent: bytes = b"",
        *,
        skip: int = 0,
    ) -> int | None:
        if not self.session:
            return None
        names, ticket, grants = self._names(adapter, keys, proofs), self._id(), list[Grant]()
        assert bool(parent) == bool(first)
        names, first = names[skip:], first + skip
        self.asked.append(("reserve", first, len(names)))
        taken = {name for names in self.open.values() for name in names}
        admitted = len(names)
        for number, name in enumerate(names):
            if name in self.held or name in taken:
                continue
            if not self.room:
                admitted = number
                break
            self.room -= 1
            reservation = self._id()
            self.open[reservation] = [name]
            grants.append(Grant(reservation, first + number, 1, [(0, 1)]))
        self._reply(Reserved(ticket, "b", grants, admitted, "" if admitted == len(names) else "full"))
        return ticket

    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None:
        if not self.session:
            return None
        names, ticket, first = self._names(adapter, keys, proofs)[skip:], self._id(), first + skip
        self.asked.append(("lease", first, len(names)))
        blocks = next((i for i, name in enumerate(names) if name not in self.held), len(names))
        pieces = [Piece(0, 2, first, blocks, 0, blocks, [(0, 1)])] if blocks else []
        lease = self._id() if blocks else 0
        if lease:
            self.leases.add(lease)
        self._reply(Leased(ticket, "b", lease, blocks, pieces))
        return ticket

    def refuse(self, ticket: int) -> Failed:
        return Failed(ticket, "b", "no", "no")

    def commit(self, ids: list[int]) -> None:
        for reservation in ids:
            for name in self.open.pop(reservation):
                self.held[name] = reservation
            self.committed.append(reservation)
        self._reply(Done(self._id(), "b", len(ids)))

    def abort(self, ids: list[int]) -> None:
        for reservation in ids:
            self.room += len(self.open.pop(reservation))
            self.aborted.append(reservation)

    def release(self, ids: list[int]) -> None:
        self.leases -= set(ids)

    def quiet(self, session: str) -> None:
        self.quieted.append(session)

    def poll(self) -> list[Reply]:
        replies = list(self._replies)
        self._replies.clear()
        return replies

    def _reply(self, reply: Reply) -> None:
        (self._waiting if self.silent else self._replies).append(reply)

    def speak(self) -> None:
        self.silent = False
        self._replies.extend(self._waiting)
        self._waiting.clear()

    def restart(self, session: str) -> None:
        """Another life: nothing is held, no answer of before comes. "" for a node that is away."""
        self.session = session
        self.held.clear()
        self.open.clear()
        self.leases.clear()
        self._replies.clear()
        self._waiting.clear()


class FakeBlocks:
    """The engine's blocks, by count of references."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}

    def hold(self, ids: list[int] | tuple[int, ...] | object) -> None:
        assert isinstance(ids, list)
        for block in ids:
            self.references[block] = self.references.get(block, 0) + 1

    def free(self, ids: object) -> None:
        assert isinstance(ids, list)
        for block in ids:
            assert self.references[block] > 0
            self.references[block] -= 1

    @property
    def held(self) -> int:
        return sum(self.references.values())
