"""Requests that begin alike go to the same worker, agreed without shared state: rendezvous hashing
(Thaler and Ravishankar 1998) with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018)."""

import math
import random
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import xxhash

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``bound``: no worker takes a request that would put it above so many times the mean number of
    running requests; a small bound is even, a large one sticky. ``key``: what is hashed; ``auto`` is
    the session where there is one, else the beginning of the prompt."""

    bound: Annotated[float, msgspec.Meta(ge=1.0, le=100.0)] = 1.25
    key: Literal["auto", "session", "prefix"] = "auto"


class ConsistentHash:
    """Each key orders all workers by a hash; the first one with room takes the request. A worker that
    leaves moves only its own keys, one that comes takes only what will be its own. Several gateways
    agree. Requests without a key go to the least loaded."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._params = params
        self._rng = rng
        self._recent = Recent()

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        key = self._key(ask)
        if not key:
            worker = lightest(self._recent.trim(candidates), self._rng).worker
            self._recent.note(worker)
            return Choice(worker, {"rule": "no key"})
        seed = xxhash.xxh3_64_intdigest(f"{ask.tenant}\0{key}".encode("utf-8", "surrogatepass"))
        running = sum(candidate.running for candidate in candidates)
        room = math.ceil(self._params.bound * (running + 1) / len(candidates))
        # Someone has room: if all ran ``room`` or more, the sum would exceed ``running``.
        ranked = sorted(candidates, key=lambda candidate: _rank(candidate, seed), reverse=True)
        place = next(place for place, candidate in enumerate(ranked) if candidate.running < room)
        return Choice(ranked[place].worker, {"rule": "hash", "passed_over": place, "room": room})

    def _key(self, ask: Ask) -> str:
        session = f"s{ask.session}" if ask.session else ""
        prefix = f"p{ask.prefix}" if ask.prefix else ""
        match self._params.key:
            case "session":
                return session
            case "prefix":
                return prefix
            case _:
                return session or prefix


def _rank(candidate: Candidate, seed: int) -> tuple[int, str]:
    return xxhash.xxh3_64_intdigest(candidate.worker.encode(), seed), candidate.worker
