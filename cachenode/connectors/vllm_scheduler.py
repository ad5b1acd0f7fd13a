"""The scheduler's side of the vLLM connector: vLLM's requests, blocks and steps, told to the plan."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from cachenode.connectors.adapters import Adapters
from cachenode.connectors.link import Link
from cachenode.connectors.naming import Asked, Namer, Names
from cachenode.connectors.plan import Plan
from cachenode.connectors.vllm_facts import Facts
from cachenode.connectors.work import Report, Work

log = logging.getLogger("vllm.hotprefix")

WAIT_S = 0.002
"""Longest wait of a step for the node's answer to a load; else the load begins in the next step."""


class Pool:
    """vLLM's block pool, bound after the connector is made. A hold is one more reference: the block is not
    given to anyone, whether its request ends, is aborted or preempted."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[number] for number in ids])

    def free(self, ids: Sequence[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[number] for number in ids])


class SchedulerSide:
    """Lives in the engine's scheduler process; every method is called in its one thread."""

    def __init__(
        self, facts: Facts, link: Link, namer: Namer, adapters: Adapters, clock: Callable[[], float]
    ) -> None:
        layout = facts.layout
        self.pool = Pool()
        self._link, self._namer, self._adapters = link, namer, adapters
        self._block = layout.block_tokens
        self._plan = Plan(
            link,
            self.pool,
            block_tokens=layout.block_tokens,
            chunk_blocks=layout.chunk_blocks,
            ranks=layout.ranks,
            hold_blocks=int(facts.options.hold * facts.num_blocks),
            clock=clock,
        )
        self._requests: dict[str, Request] = {}
        self._local: dict[str, int] = {}
        """Blocks that the engine's own cache had when the node was asked last."""
        self.refusals: Counter[str] = Counter()
        """Requests that are neither stored nor loaded, by reason."""

    def new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._name(request)

    def _name(self, request: Request) -> Names | None:
        """The names of a request, as far as its prompt goes; None where it has none, or none yet."""
        names = self._plan.names(request.request_id)
        if names is not None:
            return names
        found = self._namer.names(self._asked(request))
        if not isinstance(found, Names):
            return None
        found.extend(request.all_token_ids[: request.num_prompt_tokens])
        self._plan.add(request.request_id, found, request.num_prompt_tokens)
        return found

    def _asked(self, request: Request) -> Asked:
        lora = request.lora_request
        return Asked(
            salt=request.cache_salt or "",
            adapter=lora.lora_name if lora else "",
            adapter_digest=self._adapters.digest(lora.lora_path, lora.lora_int_id) if lora else "",
            items=tuple((item.identifier, item.mm_position.offset) for item in request.mm_features),
            embeddings=request.prompt_embeds is not None,
            streaming=request.resumable,
        )

    def matched(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Tokens behind the computed ones that can be loaded, and that they are loaded asynchronously."""
        if request.skip_reading_prefix_cache or (names := self._name(request)) is None:
            return 0, False
        self._feed(request, names, request.num_tokens // self._block)
        computed = computed_tokens // self._block
        self._local[request.request_id] = computed
        blocks = self._plan.offer(request.request_id, computed, request.num_tokens)
        return blocks * self._block, blocks > 0

    def _feed(self, request: Request, names: Names, full: int) -> None:
        if names.blocks < full:
            names.extend(request.all_token_ids[names.tokens : full * self._block])

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if external_tokens == 0:
            return
        first = self._local[request.request_id]
        table = blocks.get_block_ids()[0]
        self._plan.load(
            request.request_id, first, list(table[first : first + external_tokens // self._block])
        )

    def work(self, output: SchedulerOutput) -> Work:
        """What this step carries to the workers. What it computes is stored by a later one."""
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            # Drafted tokens may be rejected: only tokens that are known count.
            known = min(request.num_computed_tokens + scheduled, request.num_tokens)
            full = self._plan.wants(request_id, known // self._block)
            names = self._plan.names(request_id)
            if not full or names is None or state is None:
                continue
            self._feed(request, names, full)
            table = state.get_block_ids(request_id)
            if table is not None:
                self._plan.computed(request_id, full, table[0])
        for reply in self._link.wait_for(self._plan.awaited(), WAIT_S):
            self._plan.answer(reply)
        return self._plan.step(idle=output.total_num_scheduled_tokens == 0)

    def ended(self, bad: set[int], loaded: set[str], report: Report | None) -> None:
        """What the workers said in this step."""
        self._plan.bad(bad)
        for request_id in loaded:
            self._plan.loaded(request_id)
        if report is not None:
            self._plan.stored(report)

    def finished(self, request: Request, table: Sequence[int]) -> None:
        """The engine gives the request's blocks back after this."""
        self._requests.pop(request.request_id, None)
        self._local.pop(request.request_id, None)
        names = self._plan.names(request.request_id)
        if names is None:
            found = self._namer.names(self._asked(request))
            self.refusals["adapter_unread" if isinstance(found, Names) else found] += 1
            return
        known = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        full = min(max(known, 0) // self._block, len(table))
        self._feed(request, names, full)
        self._plan.end(request.request_id, full, table)

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping although no request needs it."""
        return self._plan.pending

    @property
    def copying(self) -> bool:
        """Whether blocks will be free soon without a preemption."""
        return self._plan.copying

    def forget(self) -> None:
        """Drop all that the node holds in this engine's layout."""
        self._link.forget()

    def close(self) -> None:
        figures: dict[str, Any] = {**self._plan.counts, **self.refusals}
        log.info("hotprefix: %s", ", ".join(f"{name} {value}" for name, value in figures.items()))
        self._link.close()
