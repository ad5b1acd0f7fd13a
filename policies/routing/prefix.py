"""The worker that already holds most of the prompt, unless its load costs more than that saves.

All quantities are tokens of prefill. It does not know how fast a worker computes, nor slower tiers,
nor transfers; ``ttft`` does.
"""

import random
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import xxhash

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest

Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``running_tokens``: a request that runs on a worker weighs as much as so many queued tokens.
    ``slack_tokens``: the longest holder is kept while another would be better by no more than this;
    it keeps simultaneous twins together. ``max_imbalance_tokens``: a worker loaded beyond the least
    loaded by more than this is passed over whatever it holds. ``spread_after``: a prefix is computed
    on one more worker once the prompts that share it brought so many times its length in tokens of
    their own, so that an idle fleet does not collect every user of one system prompt on one worker;
    0 never does."""

    running_tokens: Tokens = 128
    slack_tokens: Tokens = 512
    max_imbalance_tokens: Tokens = 32_768
    spread_after: Annotated[float, msgspec.Meta(ge=0.0, le=1_000_000.0)] = 4.0


class Prefix:
    """Least of load minus held tokens, per worker, without a switch for the fleet.

    Load is queued tokens plus ``running_tokens`` for each running request. So a holder loses when it
    is loaded beyond another by more than the prefill it saves (and ``slack_tokens``), and where nobody
    holds anything the least loaded is chosen. Equals are drawn by the generator.
    ``held`` says how much of the prompt a candidate is believed to hold.
    """

    def __init__(
        self,
        params: Params,
        rng: random.Random,
        held: Callable[[Candidate], int] = lambda candidate: candidate.matched,
    ) -> None:
        self._params = params
        self._rng = rng
        self._held = held
        self._recent = Recent()
        self._followers = Followers(params.spread_after)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        least = min(self._load(candidate) for candidate in candidates)
        bound = least + self._params.max_imbalance_tokens
        fit = [candidate for candidate in candidates if self._load(candidate) <= bound]
        depth = max(self._counted(ask, candidate) for candidate in fit)
        if depth == 0:
            chosen, rule = lightest(self._recent.trim(fit), self._rng, self._weight), "cold"
            self._recent.note(chosen.worker)
        else:
            chosen, rule = self._warm(ask, fit, depth)
        held, load = self._counted(ask, chosen), self._load(chosen)
        return Choice(chosen.worker, {"rule": rule, "held": held, "load": load, "least": least})

    def _warm(self, ask: Ask, fit: Sequence[Candidate], depth: int) -> tuple[Candidate, str]:
        def cost(candidate: Candidate) -> tuple[int, int]:
            return self._load(candidate) - self._counted(ask, candidate), candidate.running

        holders = [candidate for candidate in fit if self._counted(ask, candidate) == depth]
        longest = lightest(holders, self._rng, self._weight)
        best = lightest(fit, self._rng, cost)
        keep = cost(longest)[0] - cost(best)[0] <= self._params.slack_tokens
        chosen = longest if keep else best
        if self._followers.due(chosen.worker, ask, depth):
            others = [
                candidate
                for candidate in fit
                if self._counted(ask, candidate) < depth and self._load(candidate) <= self._load(chosen)
            ]
            if others:
                self._followers.clear(chosen.worker, ask, depth)
                return lightest(others, self._rng, self._weight), "spread"
        self._followers.add(chosen.worker, ask, depth)
        return chosen, "held" if keep else "guard"

    def _counted(self, ask: Ask, candidate: Candidate) -> int:
        held = self._held(candidate)
        return min(held, ask.prompt_tokens) if ask.prompt_tokens else held

    def _load(self, candidate: Candidate) -> int:
        return candidate.queued_tokens + self._params.running_tokens * candidate.running

    def _weight(self, candidate: Candidate) -> tuple[int, int]:
        return self._load(candidate), candidate.running


class Followers:
    """For each prefix that others go on from, and each worker they were sent to for it: the tokens of
    their own that they brought there since the prefix was last given to one more worker.

    A conversation never comes due: what a turn brings becomes part of the next turn's prefix, which
    is counted as another one. Prompts that share a beginning and then part do: their own tokens add
    up at the same depth. Computing the prefix once more then costs at most the ``times``-th part of
    what its users needed anyway. Bounded; the entry unused longest is forgotten first.
    """

    BOUND = 65_536

    def __init__(self, times: float) -> None:
        self._times = times
        self._brought: dict[int, int] = {}  # unused longest first

    def due(self, worker: str, ask: Ask, depth: int) -> bool:
        return 0 < self._times * depth <= self._brought.get(_place(worker, ask, depth), 0)

    def add(self, worker: str, ask: Ask, depth: int) -> None:
        if self._times and ask.prompt_tokens > depth:
            place = _place(worker, ask, depth)
            self._brought[place] = self._brought.pop(place, 0) + ask.prompt_tokens - depth
            if len(self._brought) > self.BOUND:
                del self._brought[next(iter(self._brought))]

    def clear(self, worker: str, ask: Ask, depth: int) -> None:
        self._brought.pop(_place(worker, ask, depth), None)


def _place(worker: str, ask: Ask, depth: int) -> int:
    return xxhash.xxh3_64_intdigest(
        f"{depth}\0{worker}\0{ask.tenant}\0{ask.prefix}".encode("utf-8", "surrogatepass")
    )
