"""``random``: every candidate with the same chance."""

import random
from collections.abc import Sequence

import msgspec

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import named


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``random`` has no parameters."""


class Uniform:
    """Each candidate with equal chance, whatever its load. Keeps no state but the generator's."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        return Choice(self._rng.choice(named(candidates)).worker, {"of": len(candidates)})
