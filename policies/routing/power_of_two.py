"""The lighter of two drawn at random: nearly as even as the lightest of all, without the herd that
forms where several gateways see the same lightest worker."""

import random
from collections.abc import Sequence

import msgspec

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest, named


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``power-of-two`` has no parameters."""


class PowerOfTwo:
    """Two different candidates with equal chance for each pair, then the lighter one, equals by lot.
    A worker that always reads empty is bounded by ``Recent``, which matters among few workers."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._rng = rng
        self._recent = Recent()

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        trimmed = self._recent.trim(candidates)
        pair = trimmed if len(trimmed) <= 2 else self._rng.sample(named(trimmed), 2)
        chosen = lightest(pair, self._rng)
        self._recent.note(chosen.worker)
        return Choice(
            chosen.worker,
            {
                "queued_tokens": chosen.queued_tokens,
                "running": chosen.running,
                "against": ",".join(one.worker for one in named(pair) if one is not chosen),
            },
        )
