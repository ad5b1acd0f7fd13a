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
from gateway.prediction import Apart, Cause, Prediction, cacheable, judge
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
    def status(self, worker: str) -> Source | None: ...
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
    ``slots``: where the index says the worker holds them, as of ``mark``."""

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
        if cause in ("match", "over", "under"):
            self._sources.report(plan.worker, cause == "match")
        return cause

    def forget(self, worker: str) -> None:
        """Everything learned and predicted of a worker is void: it was restarted or is gone."""
        self._predicted.drop_worker(worker)
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
            reach = _Reach(
                held=[one.get(name, {}) for one in held],
                learned=[max(one.get(name, {}).values(), default=0) for one in learned],
                pending=[one.get(name, 0) for one in pending],
                slots=frozenset(slot for matches in found for slot in matches if slot.holder == name),
            )
            views[name] = _view(query, worker, source, reach, keys)
        return views

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
    """Tokens of each prompt one worker holds: by tier, by routing history, and by what is being
    computed there; and the slots that say so."""

    held: list[dict[Tier, int]]
    learned: list[int]
    pending: list[int]
    slots: frozenset[Slot]


class _View(msgspec.Struct, frozen=True):
    """One worker as this request sees it."""

    candidate: Candidate
    keys: list[list[bytes]]
    slots: frozenset[Slot]
    prediction: Prediction | None

    @property
    def matched(self) -> int:
        return self.prediction.cached if self.prediction else self.candidate.matched


def _view(
    query: Query, worker: Worker, source: Source | None, reach: _Reach, keys: list[list[bytes]]
) -> _View:
    now = [max(tiers.values(), default=0) for tiers in reach.held]
    soon = [max(held, coming) for held, coming in zip(now, reach.pending, strict=True)]
    by_tier: dict[str, int] = {}
    for tiers in reach.held:
        for tier, tokens in tiers.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    if any(soon):
        by_tier["gpu"] = max(by_tier.get("gpu", 0), sum(soon))
    candidate = Candidate(
        worker=worker.name,
        trust=source.trust if source else "learned",
        queued_tokens=worker.queued_tokens,
        running=worker.running,
        reach=by_tier,
        learned=max(sum(reach.learned), sum(reach.pending)),
    )
    if source is None or source.trust == "learned":
        return _View(candidate, keys, reach.slots, None)
    block = source.block_size or BLOCK_TOKENS
    lengths = [len(prompt.tokens) for prompt in query.prompts]
    prediction = Prediction(
        cached=sum(cacheable(reached, length, block) for reached, length in zip(now, lengths, strict=True)),
        pending=sum(cacheable(reached, length, block) for reached, length in zip(soon, lengths, strict=True)),
        block=max(block, BLOCK_TOKENS),
        apart=query.apart,
    )
    return _View(candidate, keys, reach.slots, prediction)


def _learned_slot(worker: str) -> Slot:
    return Slot(holder=worker, tier="gpu", layout="", stride=BLOCK_TOKENS, group=0)
