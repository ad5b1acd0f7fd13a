"""From a prompt to a worker: keys, matches, candidates, the policy's choice, and what came of it.

No sockets and no clock of its own. What the index, the hub and the policy say is put together here;
each of them may be late or wrong, and then a request only costs more time.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cacheindex.events import Tier
from cacheindex.keys import BLOCK_TOKENS, Kind, Namespace, prompt_keys
from cacheindex.predicted import Predicted
from cacheindex.table import Slot, Table, by_holder
from gateway.prediction import Apart, Cause, Loads, Prediction, agreed, cacheable, judge
from gateway.tokens import Prompt
from gateway.workers import Worker
from policies.routing.base import Ask, Candidate, Choice, Policy, Trust

SWEEP = 100_000
PREFIX_BLOCKS = 16
"""Blocks that name where a prompt starts, for policies that hash it."""


class Source(Protocol):
    """What the hub tells of one worker's events."""

    @property
    def trust(self) -> Trust: ...
    @property
    def block_size(self) -> int | None: ...


class Sources(Protocol):
    """``serves``: the layouts in which a node works for a worker, none where it cannot be believed."""

    def status(self, worker: str) -> Source | None: ...
    def serves(self, node: str, worker: str) -> frozenset[str]: ...
    def report(self, worker: str, agreed: bool) -> None: ...


class Query(msgspec.Struct, frozen=True):
    """A request as routing sees it. ``prompts`` may be empty: then load alone decides."""

    model: str | None
    prompts: Sequence[Prompt]
    salt: str = ""
    session: str = ""
    tenant: str = ""
    max_tokens: int = 0
    priority: int = 0
    apart: Apart = ""

    @property
    def tokens(self) -> int:
        return sum(prompt.count for prompt in self.prompts)


class Plan(msgspec.Struct, frozen=True):
    """One choice and what is needed to judge it later. ``keys`` and ``tickets``: one per prompt;
    ``slots``: where the index says the worker, or its node for it, holds them, as of ``mark``."""

    worker: str
    choice: Choice
    matched: int
    keys: list[list[bytes]]
    prediction: Prediction | None
    slots: frozenset[Slot]
    mark: int
    tickets: list[int]


class Router:
    """``index`` is written by the hub; what was learned and predicted by the router alone. A routed
    prompt counts as held for ``waiting_s`` (or until ``failed``), after its first byte for
    ``predicted_s``; by then the engine has said so."""

    def __init__(
        self,
        policy: Policy,
        index: Table,
        sources: Sources,
        *,
        learned_bytes: int,
        predicted_s: float,
        waiting_s: float,
        secret: bytes,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._index, self._sources = policy, index, sources
        self._learned = Table(learned_bytes)
        self._predicted = Predicted()
        self._loads = Loads(clock)
        self._predicted_s, self._waiting_s = predicted_s, waiting_s
        self._secret, self._clock = secret, clock

    def plan(self, query: Query, workers: Sequence[Worker]) -> Plan:
        """Choose one of ``workers``, which must not be empty, and note the choice as predicted."""
        keys_by_namespace: dict[Namespace, list[list[bytes]]] = {}
        views: dict[str, _View] = {}
        mark = self._index.mark()
        for namespace, members in self._by_namespace(query, workers).items():
            keys = self._keys(namespace, query.prompts)
            keys_by_namespace[namespace] = keys
            views.update(self._views(query, members, keys))
        ask = self._ask(query, keys_by_namespace)
        choice = self._policy.choose(ask, [view.candidate for view in views.values()])
        view = views[choice.worker]
        until = self._clock() + self._waiting_s
        return Plan(
            worker=choice.worker,
            choice=choice,
            matched=view.matched,
            keys=view.keys,
            prediction=view.prediction,
            slots=view.slots,
            mark=mark,
            tickets=[self._predicted.put(choice.worker, keys, until) for keys in view.keys],
        )

    def first_byte(self, plan: Plan) -> None:
        """The worker has computed the prompt: it holds these keys now, whatever the index says."""
        until = self._clock() + self._predicted_s
        for ticket in plan.tickets:
            self._predicted.confirm(ticket, until)
        for keys in plan.keys:
            self._index.touch(keys)
            self._learned.store(_learned_slot(plan.worker), keys)

    def failed(self, plan: Plan) -> None:
        """The attempt ended before the first byte: nothing is known to be held."""
        for ticket in plan.tickets:
            self._predicted.drop(ticket)

    def finished(self, plan: Plan, cached: int | None) -> Cause | None:
        """Compare the prediction with the engine's count; None where nothing was predicted."""
        if plan.prediction is None:
            return None
        evicted = False
        if cached is not None and cached < plan.prediction.cached:
            held = [key for keys in plan.keys for key in keys[: plan.prediction.cached // BLOCK_TOKENS]]
            evicted = any(self._index.removed_since(slot, held, plan.mark) for slot in plan.slots)
        cause = judge(plan.prediction, cached, evicted=evicted)
        self._loads.judged(plan.worker, plan.prediction, cause)
        verdict = agreed(plan.prediction, cached or 0, cause)
        if verdict is not None:
            self._sources.report(plan.worker, verdict)
        return cause

    def forget(self, worker: str) -> None:
        """Everything learned and predicted of a worker is void: it was restarted or is gone."""
        self._predicted.drop_worker(worker)
        self._loads.forget(worker)
        self._learned.forget(worker)
        self._learned.sweep(SWEEP)

    def _by_namespace(self, query: Query, workers: Sequence[Worker]) -> dict[Namespace, list[Worker]]:
        kind: Kind = "tokens" if all(prompt.kind == "tokens" for prompt in query.prompts) else "text"
        groups: dict[Namespace, list[Worker]] = {}
        for worker in workers:
            assert worker.served is not None
            adapter = worker.served.names.get(query.model or "", "")
            namespace = Namespace(worker.served.base, adapter, query.salt, kind)
            groups.setdefault(namespace, []).append(worker)
        return groups

    def _keys(self, namespace: Namespace, prompts: Sequence[Prompt]) -> list[list[bytes]]:
        root = namespace.root(self._secret)
        return [prompt_keys(root, prompt.tokens) for prompt in prompts]

    def _views(self, query: Query, workers: Sequence[Worker], keys: list[list[bytes]]) -> dict[str, "_View"]:
        exact = bool(query.prompts) and all(prompt.kind == "tokens" for prompt in query.prompts)
        now = self._clock()
        found = [self._index.match(one) if exact else {} for one in keys]
        held = [by_holder(matches) for matches in found]
        learned = [by_holder(self._learned.match(one)) for one in keys]
        pending = [self._predicted.match(one, now) for one in keys]
        views = {}
        for worker in workers:
            name = worker.name
            source = self._sources.status(name) if exact else None
            layouts = self._layouts(worker) if exact else frozenset[str]()
            node = [_of_node(matches, worker.spec.node, layouts) for matches in found]
            reach = _Reach(
                held=[one.get(name, {}) for one in held],
                node=[_by_tier(slots) for slots in node],
                learned=[max(one.get(name, {}).values(), default=0) for one in learned],
                pending=[one.get(name, 0) for one in pending],
                slots=frozenset(slot for matches in found for slot in matches if slot.holder == name),
                node_slots=frozenset(slot for slots in node for slot in slots),
            )
            views[name] = _view(query, worker, source, reach, keys)
        return views

    def _layouts(self, worker: Worker) -> frozenset[str]:
        node = worker.spec.node
        if node is None or not self._loads.count(worker.name):
            return frozenset()
        return self._sources.serves(node, worker.name)

    def _ask(self, query: Query, keys: dict[Namespace, list[list[bytes]]]) -> Ask:
        first = next((chains[0] for chains in keys.values() if chains and chains[0]), None)
        session = hashlib.sha256(f"{query.tenant}\0{query.session}".encode("utf-8", "surrogatepass"))
        return Ask(
            prompt_tokens=query.tokens,
            max_tokens=query.max_tokens,
            session=session.hexdigest()[:32] if query.session else "",
            tenant=query.tenant,
            priority=query.priority,
            prefix=first[min(len(first), PREFIX_BLOCKS) - 1].hex() if first else "",
        )


class _Reach(msgspec.Struct, frozen=True):
    """Tokens of each prompt one worker holds: by tier, by tier of its node, by routing history, and by
    what is being computed there; and the slots that say so."""

    held: list[dict[Tier, int]]
    node: list[dict[Tier, int]]
    learned: list[int]
    pending: list[int]
    slots: frozenset[Slot]
    node_slots: frozenset[Slot]


class _View(msgspec.Struct, frozen=True):
    """One worker as this request sees it."""

    candidate: Candidate
    keys: list[list[bytes]]
    slots: frozenset[Slot]
    prediction: Prediction | None

    @property
    def matched(self) -> int:
        if self.prediction is None or self.candidate.trust == "learned":
            return self.candidate.matched
        return self.prediction.cached


def _view(
    query: Query, worker: Worker, source: Source | None, reach: _Reach, keys: list[list[bytes]]
) -> _View:
    own = [max(tiers.values(), default=0) for tiers in reach.held]
    beside = [max(tiers.values(), default=0) for tiers in reach.node]
    soon = [max(held, coming) for held, coming in zip(own, reach.pending, strict=True)]
    by_tier: dict[str, int] = {}
    for held, node in zip(reach.held, reach.node, strict=True):
        for tier in held.keys() | node.keys():
            by_tier[tier] = by_tier.get(tier, 0) + max(held.get(tier, 0), node.get(tier, 0))
    near = [max(held.get("gpu", 0), coming) for held, coming in zip(reach.held, reach.pending, strict=True)]
    if any(near):
        by_tier["gpu"] = sum(near)
    candidate = Candidate(
        worker=worker.name,
        trust=source.trust if source else "learned",
        queued_tokens=worker.queued_tokens,
        running=worker.running,
        reach=by_tier,
        learned=max(sum(reach.learned), sum(reach.pending)),
        beside=sum(beside),
    )
    prediction = None
    if source is None or source.trust == "learned":
        own = soon = [0] * len(own)  # Its own events say nothing, its node's may.
    if any(beside) or (source is not None and source.trust != "learned"):
        strides = [slot.stride for slot in reach.node_slots]
        block = (source.block_size if source else None) or max(strides, default=BLOCK_TOKENS)
        prediction = _predict(query, block, (own, soon, beside), node=worker.spec.node is not None)
    return _View(candidate, keys, reach.slots | reach.node_slots, prediction)


def _predict(
    query: Query, block: int, reach: tuple[list[int], list[int], list[int]], *, node: bool
) -> Prediction:
    """From tokens of each prompt that an engine holds, will hold, and that its node holds for it."""
    own, soon, beside = reach
    lengths = [len(prompt.tokens) for prompt in query.prompts]

    def counted(reached: list[int]) -> int:
        return sum(cacheable(one, length, block) for one, length in zip(reached, lengths, strict=True))

    return Prediction(
        cached=counted(list(map(max, own, beside))),
        pending=counted(list(map(max, soon, beside))),
        block=max(block, BLOCK_TOKENS),
        apart=query.apart,
        local=counted(own) if node else None,
    )


def _of_node(matches: dict[Slot, int], node: str | None, layouts: frozenset[str]) -> dict[Slot, int]:
    """Of what was found, what this node holds in these layouts."""
    if not layouts:
        return {}
    return {slot: n for slot, n in matches.items() if slot.holder == node and slot.layout in layouts}


def _by_tier(slots: dict[Slot, int]) -> dict[Tier, int]:
    tiers: dict[Tier, int] = {}
    for slot, tokens in slots.items():
        tiers[slot.tier] = max(tokens, tiers.get(slot.tier, 0))
    return tiers


def _learned_slot(worker: str) -> Slot:
    return Slot(holder=worker, tier="gpu", layout="", stride=BLOCK_TOKENS, group=0)
