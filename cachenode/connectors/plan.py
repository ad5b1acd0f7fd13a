"""Which blocks of which request are loaded and stored, and when: the scheduler side's state.

Pure: the node, the engine's blocks and the clock come by constructor, and no call waits. One thread.
A request is offered what the node holds of its prompt, except the last token, which must be computed;
once a load of it has failed, nothing any more. Blocks are reserved in the step that computes them and
copied in a later one. Blocks of the answer wait until they fill a chunk or the request ends.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cachenode.connectors.loads import Lender, Loads
from cachenode.connectors.naming import Names
from cachenode.connectors.stores import Blocks, Keeper, Stores, Wanted
from cachenode.connectors.work import Report, Work
from cachenode.wire import MAX_BLOCKS, Reply

MOST = MAX_BLOCKS // 2
"""Most blocks asked at once; a prompt that has more is loaded and stored in part."""


class Node(Lender, Keeper, Protocol):
    """The node as the scheduler's side sees it. No call blocks; tickets are the ids of the replies.
    ``session`` is "" without a connection, and another one in each connection."""

    def poll(self) -> list[Reply]: ...
    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int: ...
    def quiet(self, session: str) -> None: ...


class _Request(msgspec.Struct):
    """``stored``: blocks up to here are held by the node, on their way, or given up. ``looked``: whether
    the node was asked what it holds of it. ``refused``: nothing of it is loaded, ``short``: nor stored
    any more."""

    names: Names
    prompt_blocks: int
    stored: int = 0
    looked: bool = False
    refused: bool = False
    short: bool = False


class Plan:
    """``ranks`` report each copy; ``chunk_blocks`` is the layout's; at most ``hold_blocks`` blocks of the
    engine are held for stores; an answer of the node is awaited for ``patience_s`` at most."""

    def __init__(
        self,
        node: Node,
        blocks: Blocks,
        *,
        block_tokens: int,
        chunk_blocks: int,
        ranks: int,
        hold_blocks: int,
        clock: Callable[[], float],
        patience_s: float = 0.5,
    ) -> None:
        self._node, self._clock = node, clock
        self._block_tokens, self._chunk_blocks = block_tokens, chunk_blocks
        self._requests: dict[str, _Request] = {}
        self._loads = Loads(node, chunk_blocks, patience_s)
        self._stores = Stores(
            node,
            blocks,
            chunk_blocks=chunk_blocks,
            ranks=ranks,
            hold_blocks=hold_blocks,
            patience_s=patience_s,
        )
        self._session = ""
        self._old: set[str] = set()
        self.blocks_loaded = 0
        self.loads_failed = 0
        self.blocks_not_stored = 0
        """Blocks of ended requests that were left out, because too many were held or none fitted."""

    def add(self, request: str, names: Names, prompt_tokens: int) -> None:
        """A request that may be loaded and stored; its names may still be empty."""
        self._requests[request] = _Request(names, prompt_tokens // self._block_tokens)

    def names(self, request: str) -> Names | None:
        """The names to feed; None for a request that was not added."""
        state = self._requests.get(request)
        return None if state is None else state.names

    def offer(self, request: str, computed: int, tokens: int) -> int:
        """How many blocks behind the ``computed`` ones can be loaded, of so many ``tokens``. Its names
        must reach that far."""
        self._follow()
        state = self._requests.get(request)
        if state is None or state.refused or not self._session:
            return 0
        end = min(max(tokens - 1, 0) // self._block_tokens, state.names.blocks, computed + MOST)
        if end <= computed:
            return 0
        # A record is found by its first block: where the computed ones' chunk begins, or behind them.
        start = computed - computed % self._chunk_blocks
        held = self._held(state.names, start, end)
        if held <= computed and start < computed:
            held = self._held(state.names, computed, end)
        return max(0, held - computed)

    def _held(self, names: Names, first: int, end: int) -> int:
        """Up to which block the node holds those from ``first`` on."""
        return first + self._node.match(names.adapter, names.keys(first, end), names.proofs(first, end))

    def load(self, request: str, first: int, blocks: list[int]) -> None:
        """The engine waits for these blocks of the request from now on."""
        self._loads.begin(request, self._requests[request].names, first, blocks, self._clock())

    def wants(self, request: str, full: int) -> int:
        """Up to which block names and table must reach to store what is computed; 0: nothing to store."""
        self._follow()
        state = self._requests.get(request)
        if state is None or state.short or not self._session:
            return 0
        if full > state.prompt_blocks:
            full = max(state.prompt_blocks, full // self._chunk_blocks * self._chunk_blocks)
        return full if full > state.stored else 0

    def computed(self, request: str, full: int, table: Sequence[int], *, already: bool = False) -> None:
        """Blocks up to ``full`` are computed by the end of this step (or ``already``) and named; ``table``:
        the request's engine blocks."""
        self._follow()
        state = self._requests.get(request)
        if state is None or state.short or full <= state.stored or not self._session:
            return
        if not state.looked:
            state.looked, state.stored = True, self._held(state.names, 0, full)
        first = state.stored
        end = min(full, first + min(MOST, self._stores.room))
        wanted = Wanted(request, state.names, first, already)
        if end > first and self._stores.reserve(wanted, list(table[first:end]), self._clock()):
            state.stored = end

    def end(self, request: str, full: int, table: Sequence[int]) -> None:
        """The request is finished or aborted; ``full`` blocks are computed (or promised by a load) and
        named, and the engine frees them after this. What is under way for it goes on."""
        if self._loads.loading(request):
            full = 0
        self.computed(request, full, table, already=True)
        state = self._requests.pop(request, None)
        if state is not None and self._session:
            self.blocks_not_stored += max(0, full - state.stored)
        self._loads.abort(request)

    def awaited(self) -> list[int]:
        """Tickets of answers that loads wait for."""
        return self._loads.tickets()

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping for stores."""
        return self._stores.pending

    @property
    def copying(self) -> bool:
        """Whether held blocks will be free soon."""
        return self._stores.copying

    def answer(self, reply: Reply) -> None:
        """One reply of the node; others than to loads and reservations mean nothing here."""
        if not self._loads.answer(reply):
            self._stores.answer(reply)

    def step(self, *, idle: bool = False) -> Work:
        """Takes the node's answers and hands out what the workers can begin now."""
        for reply in self._node.poll():
            self.answer(reply)
        self._follow()
        now = self._clock()
        work = Work(self._session, self._loads.ready(now), self._stores.ready(now), idle)
        self._mark_short()
        self._quieten()
        return work

    def _follow(self) -> None:
        """In another life of the connection, what the node holds must be asked again."""
        if self._node.session == self._session:
            return
        if self._session:
            self._old.add(self._session)
        self._session = self._node.session
        self._loads.session_changed()
        self._stores.session_changed()
        for state in self._requests.values():
            state.looked, state.stored, state.short = False, 0, False

    def _mark_short(self) -> None:
        for request in self._stores.short:
            if (state := self._requests.get(request)) is not None:
                state.short = True
        self._stores.short.clear()

    def _quieten(self) -> None:
        for session in [s for s in self._old if not (self._loads.uses(s) or self._stores.uses(s))]:
            self._old.discard(session)
            self._node.quiet(session)

    def bad(self, blocks: set[int]) -> None:
        """Engine blocks that could not be loaded, as the workers said in this step."""
        if blocks:
            self._loads.bad(blocks)

    def loaded(self, request: str) -> None:
        """Every rank has ended this load. A load that was not whole is not offered to the request again."""
        ended = self._loads.ended(request)
        if ended is None:
            return
        if ended.whole:
            self.blocks_loaded += ended.blocks
            return
        self.loads_failed += 1
        if (state := self._requests.get(request)) is not None:
            state.refused, state.looked, state.stored = True, False, 0

    def stored(self, report: Report) -> None:
        """What the ranks said of stores."""
        self._stores.report(report)
        self._mark_short()

    @property
    def counts(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return {
            "blocks_loaded": self.blocks_loaded,
            "loads_failed": self.loads_failed,
            "blocks_stored": self._stores.stored,
            "blocks_not_stored": self.blocks_not_stored,
            "answers_late": self._loads.late + self._stores.late,
        }

    def check_integrity(self) -> None:
        self._loads.check_integrity()
        self._stores.check_integrity()
