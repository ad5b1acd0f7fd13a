"""Loads on their way: asked of the node, handed to the workers once, ended once. Part of ``plan``."""

from typing import Protocol

import msgspec

from cachenode.connectors.naming import Names
from cachenode.connectors.work import Load
from cachenode.wire import Leased, Reply


class Lender(Protocol):
    """The part of the node that loads need; None or "" while there is no connection."""

    @property
    def session(self) -> str: ...
    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None: ...
    def release(self, ids: list[int]) -> object: ...


class Ended(msgspec.Struct, frozen=True):
    """A load that every rank has ended; ``whole`` unless a block of it is bad."""

    blocks: int
    whole: bool


class _Loading(msgspec.Struct):
    """``ticket`` until the node answered or was given up; ``load`` once it can be handed out."""

    request: str
    session: str
    first: int
    blocks: list[int]
    ticket: int | None
    deadline: float
    load: Load | None = None
    handed: bool = False
    failed: bool = False


class Loads:
    """One load a request at a time. Every one that began is handed out by ``ready`` exactly once: the
    workers must report its end, also when it was aborted or the node is gone."""

    def __init__(self, node: Lender, chunk_blocks: int, patience_s: float) -> None:
        self._node, self._chunk_blocks, self._patience_s = node, chunk_blocks, patience_s
        self._loading: dict[str, _Loading] = {}
        self._late: set[int] = set()
        self.late = 0
        """Answers that did not come in time."""

    def begin(self, request: str, names: Names, first: int, blocks: list[int], now: float) -> None:
        """The engine waits for these blocks, from the prompt's block ``first`` on."""
        skip, end = first % self._chunk_blocks, first + len(blocks)
        start = first - skip
        ticket = self._node.lease(
            start, names.keys(start, end), names.proofs(start, end), names.adapter, skip=skip
        )
        session = self._node.session if ticket is not None else ""
        self._loading[request] = _Loading(request, session, first, blocks, ticket, now + self._patience_s)

    def tickets(self) -> list[int]:
        """Whose answers the engine waits for."""
        return [loading.ticket for loading in self._loading.values() if loading.ticket is not None]

    def loading(self, request: str) -> bool:
        """Whether a load of it has begun and not ended."""
        return request in self._loading

    def answer(self, reply: Reply) -> bool:
        """Whether this was an answer to a load."""
        if reply.id in self._late:
            self._late.discard(reply.id)
            if isinstance(reply, Leased) and reply.lease:
                self._node.release([reply.lease])
            return True
        loading = next((one for one in self._loading.values() if one.ticket == reply.id), None)
        if loading is None:
            return False
        loading.ticket = None
        leased = reply if isinstance(reply, Leased) else None
        loading.load = Load(
            loading.request,
            loading.session,
            leased.lease if leased else 0,
            loading.first,
            loading.blocks,
            leased.pieces if leased and loading.blocks else [],
        )
        return True

    def abort(self, request: str) -> None:
        """Nobody wants the bytes any more; the end is still to be reported."""
        loading = self._loading.get(request)
        if loading is not None and not loading.handed:
            loading.blocks = []
            if loading.load is not None:
                loading.load = msgspec.structs.replace(loading.load, blocks=[], pieces=[])

    def ready(self, now: float) -> list[Load]:
        """What the workers can begin now; without pieces where the node did not answer or is gone."""
        return [
            self._hand(one) for one in self._loading.values() if not one.handed and self._is_due(one, now)
        ]

    def _is_due(self, loading: _Loading, now: float) -> bool:
        if loading.load is not None or loading.ticket is None or loading.session != self._node.session:
            return True
        if loading.deadline > now:
            return False
        self._late.add(loading.ticket)
        self.late += 1
        return True

    def _hand(self, loading: _Loading) -> Load:
        loading.handed, loading.ticket = True, None
        if loading.load is None:
            loading.load = Load(loading.request, "", 0, loading.first, loading.blocks, [])
        return loading.load

    def bad(self, blocks: set[int]) -> None:
        """The workers could not load these blocks of the engine; said before the load's end."""
        for loading in self._loading.values():
            loading.failed = loading.failed or not blocks.isdisjoint(loading.blocks)

    def ended(self, request: str) -> Ended | None:
        """All ranks have ended the load of this request; None where there was none."""
        loading = self._loading.pop(request, None)
        if loading is None:
            return None
        load = loading.load
        if load is not None and load.lease and load.session == self._node.session:
            self._node.release([load.lease])
        return Ended(len(loading.blocks), not loading.failed)

    def session_changed(self) -> None:
        """Answers of an earlier session will not come."""
        self._late.clear()

    def uses(self, session: str) -> bool:
        """Whether workers may still read for this session."""
        return any(one.load is not None and one.load.session == session for one in self._loading.values())

    def check_integrity(self) -> None:
        for request, one in self._loading.items():
            assert one.request == request
            assert one.ticket is None or (not one.handed and one.load is None)
            assert one.load is not None or not one.handed
