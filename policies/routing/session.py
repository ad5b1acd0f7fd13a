"""A session stays where it began."""

import random
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from policies.routing.base import Ask, Candidate, Choice
from policies.routing.load import Recent, lightest


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``max_sessions``: sessions remembered; the one unused longest is forgotten first and is placed
    anew when it comes back. One costs about 150 bytes."""

    max_sessions: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000


class Session:
    """Requests of one session (of one tenant) go to one worker for as long as that worker is a
    candidate, whatever its load. A new session, one whose worker has left, and a request without
    session go to the least loaded. A session that had to move stays at its new place."""

    def __init__(self, params: Params, rng: random.Random) -> None:
        self._bound = params.max_sessions
        self._rng = rng
        self._recent = Recent()
        self._home: dict[bytes, str] = {}  # unused longest first

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice:
        if not ask.session:
            return Choice(self._place(candidates), {"rule": "no session"})
        # A digest, because a client picks the length of its session's name.
        key = xxhash.xxh3_128_digest(f"{ask.tenant}\0{ask.session}".encode("utf-8", "surrogatepass"))
        home = self._home.pop(key, None)
        if home is not None and any(candidate.worker == home for candidate in candidates):
            worker, rule = home, "home"
        else:
            worker, rule = self._place(candidates), "new" if home is None else "moved"
        self._home[key] = worker
        if len(self._home) > self._bound:
            del self._home[next(iter(self._home))]
        return Choice(worker, {"rule": rule})

    def _place(self, candidates: Sequence[Candidate]) -> str:
        worker = lightest(self._recent.trim(candidates), self._rng).worker
        self._recent.note(worker)
        return worker
