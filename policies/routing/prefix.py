"""The worker that already holds most of the prompt, unless its load costs more than that saves.

All quantities are tokens of prefill. It does not know how fast a worker computes, nor how long a load
from a slower tier takes, but that it takes something: a token to be loaded counts for a little less than
one at hand. ``ttft`` knows.
"""

import random
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest

LOAD_SHARE = 16
"""A token that must be loaded first costs so many times less than one that must be computed."""

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


class View(NamedTuple):
    """A candidate in tokens. ``load``: queued plus what running ones weigh. ``cost``: load minus what
    of this prompt is ``held``."""

    load: int
    running: int
    cost: int
    held: int
    worker: str


def usable(candidate: Candidate) -> int:
    """What a candidate holds, less what loading it costs: of equals, the one that has it at hand wins."""
    matched = candidate.matched
    return matched - (matched - candidate.at_hand) // LOAD_SHARE


by_load = itemgetter(0, 1)
by_cost = itemgetter(2, 1)


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
        held: Callable[[Candidate], int] = usable,
    ) -> None:
        self._params = params
        self._rng = rng
        self._held = held
        self._recent = Recent()
        self._followers = Followers(params.spread_after)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        views = self._views(ask, candidates)
        least = min(view.load for view in views)
        bound = least + self._params.max_imbalance_tokens
        fit = [view for view in views if view.load <= bound]
        depth = max(view.held for view in fit)
        if depth == 0:
            chosen, rule = lightest(self._recent.trim(fit, by_load), self._rng, by_load), "cold"
            self._recent.note(chosen.worker)
        else:
            chosen, rule = self._warm(ask, fit, depth)
        return Choice(chosen.worker, {"rule": rule, "held": chosen.held, "load": chosen.load, "least": least})

    def _views(self, ask: Ask, candidates: Sequence[Candidate]) -> list[View]:
        weight, most = self._params.running_tokens, ask.prompt_tokens
        views = []
        for one in candidates:
            load, held = one.queued_tokens + weight * one.running, self._held(one)
            if 0 < most < held:
                held = most
            views.append(View(load, one.running, load - held, held, one.worker))
        return views

    def _warm(self, ask: Ask, fit: Sequence[View], depth: int) -> tuple[View, str]:
        longest = lightest([view for view in fit if view.held == depth], self._rng, by_load)
        best = lightest(fit, self._rng, by_cost)
        keep = longest.cost - best.cost <= self._params.slack_tokens
        chosen = longest if keep else best
        others = [view for view in fit if view.held < depth and view.load <= chosen.load]
        if others and self._followers.come(chosen.worker, ask, depth):
            return lightest(others, self._rng, by_load), "spread"
        return chosen, "held" if keep else "guard"


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

    def come(self, worker: str, ask: Ask, depth: int) -> bool:
        """Counts one more prompt that goes on from ``depth``. True, and counted from zero again, when
        it should go to a worker that does not hold so much."""
        if not self._times or ask.prompt_tokens <= depth:
            return False
        name = f"{depth}\0{worker}\0{ask.tenant}\0{ask.prefix}"
        place = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        brought = self._brought.pop(place, 0)
        if brought >= self._times * depth:
            return True
        self._brought[place] = brought + ask.prompt_tokens - depth
        if len(self._brought) > self.BOUND:
            del self._brought[next(iter(self._brought))]
        return False
