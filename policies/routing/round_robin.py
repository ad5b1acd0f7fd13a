"""Everyone in turn."""

import random
from collections.abc import Sequence

import msgspec

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import named

KNOWN = 4096
"""Workers whose last turn is remembered; beyond it the one that waited longest counts as new."""


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``round-robin`` has no parameters."""


class RoundRobin:
    """The candidate whose last turn is longest ago; those that never had one come first, by lot.

    Turns belong to workers, not to positions in a list, so that workers that come and go, and models
    that only some workers serve, neither skip anyone nor serve anyone twice.
    """

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._rng = rng
        self._turn = 0
        self._last: dict[str, int] = {}  # oldest turn first

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        last = self._last
        fresh = [candidate for candidate in candidates if candidate.worker not in last]
        if fresh:
            worker = (fresh[0] if len(fresh) == 1 else self._rng.choice(named(fresh))).worker
        else:
            worker = min(candidates, key=lambda candidate: last[candidate.worker]).worker
        waited = self._turn - last.pop(worker, self._turn)
        self._turn += 1
        last[worker] = self._turn
        if len(last) > KNOWN:
            del last[next(iter(last))]
        return Choice(worker, {"turn": self._turn, "waited": waited})
