"""Stores on their way: blocks held, space reserved, copied by every rank, committed. Part of ``plan``."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cachenode.connectors.naming import Names
from cachenode.connectors.work import Report, Store
from cachenode.wire import Reply, Reserved


class Keeper(Protocol):
    """The part of the node that stores need; None or "" while there is no connection."""

    @property
    def session(self) -> str: ...
    def reserve(
        self,
        first: int,
        keys: bytes,
        proofs: bytes,
        adapter: str = "",
        parent: bytes = b"",
        *,
        skip: int = 0,
    ) -> int | None: ...
    def commit(self, ids: list[int]) -> object: ...
    def abort(self, ids: list[int]) -> object: ...


class Blocks(Protocol):
    """The engine's blocks: a held one keeps its bytes and is given to nobody else."""

    def hold(self, ids: Sequence[int]) -> None: ...
    def free(self, ids: Sequence[int]) -> None: ...


class Wanted(msgspec.Struct, frozen=True):
    """Blocks of a request from ``first`` on; ``computed`` before the step that comes next, not in it."""

    request: str
    names: Names
    first: int
    computed: bool = False


class _Storing(msgspec.Struct):
    """``blocks`` are held, and computed before step ``step``. ``missing``: ranks that have not ended it."""

    step: int
    request: str
    session: str
    first: int
    blocks: list[int]
    deadline: float
    reservations: list[int] = []
    missing: int = 0
    failed: bool = False


class Stores:
    """Holds at most ``hold_blocks`` blocks; each is freed once: when every rank has copied it, the node
    has refused it or is lost, or its answer is late (a late grant is aborted)."""

    def __init__(
        self,
        node: Keeper,
        blocks: Blocks,
        *,
        chunk_blocks: int,
        ranks: int,
        hold_blocks: int,
        patience_s: float,
    ) -> None:
        self._node, self._blocks, self._chunk_blocks, self._ranks = node, blocks, chunk_blocks, ranks
        self._hold_blocks, self._patience_s = hold_blocks, patience_s
        self._asked: dict[int, _Storing] = {}
        self._copying: dict[int, _Storing] = {}
        self._ready: list[Store] = []
        self._late: set[int] = set()
        self._jobs = 0
        self._held = 0
        self._step = 1
        self.short: set[str] = set()
        """Requests of which the node could not take all: what comes behind could not be found."""
        self.late = 0
        self.stored = 0
        """Blocks committed."""
        self.refused = 0
        """Blocks the node had no room for."""

    @property
    def room(self) -> int:
        """How many more blocks may be held."""
        return self._hold_blocks - self._held

    @property
    def pending(self) -> bool:
        return bool(self._asked or self._copying)

    @property
    def copying(self) -> bool:
        """Whether held blocks are with the workers, and so will be free without the node's help."""
        return bool(self._copying)

    def reserve(self, wanted: Wanted, blocks: list[int], now: float) -> bool:
        """Ask for space, and hold the blocks; False without a connection."""
        first, names = wanted.first, wanted.names
        skip, end = first % self._chunk_blocks, first + len(blocks)
        start = first - skip
        keys, proofs, parent = names.keys(start, end), names.proofs(start, end), names.parent(start)
        ticket = self._node.reserve(start, keys, proofs, names.adapter, parent, skip=skip)
        if ticket is None:
            return False
        self._blocks.hold(blocks)
        self._held += len(blocks)
        step = self._step - wanted.computed
        session, deadline = self._node.session, now + self._patience_s
        self._asked[ticket] = _Storing(step, wanted.request, session, first, blocks, deadline)
        return True

    def answer(self, reply: Reply) -> bool:
        """Whether this was an answer to a reservation."""
        granted = reply if isinstance(reply, Reserved) else None
        if reply.id in self._late:
            self._late.discard(reply.id)
            if granted and granted.grants:
                self._node.abort([grant.reservation for grant in granted.grants])
            return True
        storing = self._asked.pop(reply.id, None)
        if storing is None:
            return False
        admitted = granted.admitted if granted else 0
        if admitted < len(storing.blocks):
            self.short.add(storing.request)
            self.refused += len(storing.blocks) - admitted
        if granted and granted.grants:
            self._begin(storing, granted)
        else:
            self._free(storing.blocks)
        return True

    def _begin(self, storing: _Storing, granted: Reserved) -> None:
        wanted = {i for grant in granted.grants for i in range(grant.first, grant.first + grant.blocks)}
        rest = [b for i, b in enumerate(storing.blocks, storing.first) if i not in wanted]
        self._free(rest)
        first, end = min(wanted), max(wanted) + 1
        table = storing.blocks[first - storing.first : end - storing.first]
        self._jobs += 1
        self._ready.append(Store(self._jobs, storing.session, first, table, granted.grants))
        storing.blocks = [b for i, b in enumerate(storing.blocks, storing.first) if i in wanted]
        storing.reservations = [grant.reservation for grant in granted.grants]
        storing.missing = self._ranks
        self._copying[self._jobs] = storing

    def ready(self, now: float) -> list[Store]:
        """What the workers can begin in this step: the copies run beside its computation, so what it computes
        waits for the next. Gives up on answers that are late or will not come."""
        session = self._node.session
        for ticket, storing in list(self._asked.items()):
            if storing.session == session and storing.deadline > now:
                continue
            del self._asked[ticket]
            self._free(storing.blocks)
            self.short.add(storing.request)
            self.late += 1
            if storing.session == session:
                self._late.add(ticket)
        for store in [store for store in self._ready if store.session != session]:
            self._ready.remove(store)
            self._free(self._copying.pop(store.job).blocks)
        ready = [store for store in self._ready if self._copying[store.job].step < self._step]
        self._ready = [store for store in self._ready if self._copying[store.job].step >= self._step]
        self._step += 1
        return ready

    def report(self, report: Report) -> None:
        """What the ranks have ended since."""
        for job, ranks in report.ended.items():
            storing = self._copying.get(job)
            if storing is None:
                continue
            storing.missing -= ranks
            storing.failed = storing.failed or job in report.failed
            if storing.missing > 0:
                continue
            del self._copying[job]
            self._free(storing.blocks)
            if storing.session != self._node.session:
                continue
            if storing.failed:
                self._node.abort(storing.reservations)
                self.short.add(storing.request)
            else:
                self._node.commit(storing.reservations)
                self.stored += len(storing.blocks)

    def _free(self, blocks: list[int]) -> None:
        """Tails first: the engine then evicts tails first."""
        self._held -= len(blocks)
        if blocks:
            self._blocks.free(blocks[::-1])

    def session_changed(self) -> None:
        """Answers of an earlier session will not come."""
        self._late.clear()

    def uses(self, session: str) -> bool:
        """Whether workers may still write for this session."""
        return any(storing.session == session for storing in self._copying.values())

    def check_integrity(self) -> None:
        held = sum(len(one.blocks) for one in (*self._asked.values(), *self._copying.values()))
        assert held == self._held <= self._hold_blocks
        assert not self._late & self._asked.keys()
        assert all(1 <= one.missing <= self._ranks for one in self._copying.values())
        assert {store.job for store in self._ready} <= self._copying.keys()
