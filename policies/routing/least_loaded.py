"""The worker with the least work in front of it."""

import random
from collections.abc import Sequence

import msgspec

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``least-loaded`` has no parameters."""


class LeastLoaded:
    """Fewest queued prompt tokens, then fewest running requests, then by lot. A worker that always
    reads empty is bounded by ``Recent``."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._rng = rng
        self._recent = Recent()

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        chosen = lightest(self._recent.trim(candidates), self._rng)
        self._recent.note(chosen.worker)
        return Choice(chosen.worker, {"queued_tokens": chosen.queued_tokens, "running": chosen.running})
