"""``prefix`` over routing history alone: for engines that publish no events, and as the yardstick that
shows what events are worth."""

import random
from collections.abc import Sequence

from policies.routing import prefix
from policies.routing.base import Ask, Candidate, Choice


class Params(prefix.Params, frozen=True, forbid_unknown_fields=True):
    """As for ``prefix``."""


class LearnedPrefix:
    """Decides as ``prefix`` does, but believes only ``Candidate.learned``, whatever a worker's trust."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._prefix = prefix.Prefix(params, rng, held=lambda candidate: candidate.learned)

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        return self._prefix.choose(ask, candidates)
