"""The contract of a routing policy: what it is asked, what it sees, what it answers."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

Trust = Literal["exact", "syncing", "suspect", "learned"]
"""How far the index may be believed about a worker. ``exact``: its events are complete.
``syncing``: events are flowing, history is being fetched. ``suspect``: a gap or mispredictions.
``learned``: no events; only what we routed there."""


class Ask(msgspec.Struct, frozen=True):
    """One request, as far as a decision may depend on it.

    ``prompt_tokens`` is 0 where the prompt could not be counted. ``session`` is "" without one.
    ``prefix`` names the start of the prompt: equal for requests that begin alike, "" if unknown.
    """

    prompt_tokens: int
    max_tokens: int = 0
    session: str = ""
    tenant: str = ""
    priority: int = 0
    prefix: str = ""


class Candidate(msgspec.Struct, frozen=True):
    """One healthy worker that serves the requested model.

    ``queued_tokens``: prompt tokens it was sent and has yet to compute, those it holds left out.
    ``running``: requests leased to it. ``reach``: tokens of this prompt it can use, by tier: by its
    events, by predictions, and by the events of the node beside it. ``learned``: tokens of this prompt
    by routing history alone. ``beside``: those that its node holds for it, to be believed whatever the
    worker's own trust.
    """

    worker: str
    trust: Trust = "exact"
    queued_tokens: int = 0
    running: int = 0
    reach: Mapping[str, int] = {}
    learned: int = 0
    beside: int = 0

    @property
    def matched(self) -> int:
        """Tokens it need not compute, as far as can be believed: the index where its events are
        whole or arriving, routing history and its node elsewhere."""
        if self.trust in ("exact", "syncing"):
            return max(self.reach.values()) if self.reach else 0
        return max(self.learned, self.beside)

    @property
    def at_hand(self) -> int:
        """Tokens of ``matched`` that it need not load from a slower tier first."""
        own = self.reach.get("gpu", 0) if self.trust in ("exact", "syncing") else self.learned
        return min(own, self.matched)


class Choice(msgspec.Struct, frozen=True):
    """``why`` holds the terms of the decision, small and printable, for people."""

    worker: str
    why: Mapping[str, float | str]


class Policy(Protocol):
    """Deterministic in (ask, candidates, own state, injected random generator).

    ``choose`` never blocks, reads no clock, and returns one of ``candidates``, which is never
    empty and names each worker once. The order of candidates carries no meaning.
    """

    def choose(self, ask: Ask, candidates: Sequence[Candidate]) -> Choice: ...
