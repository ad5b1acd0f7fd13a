"""Prediction against truth: what an engine should report as cached, and what a difference means.

An engine with our connector counts what it has itself and what it loads from its node, whichever reaches
further. What it has itself is known by its own events, and only that is held against them.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from cacheindex.trust import Outcomes

PAUSE_S = 30.0
"""How long a worker's node does not count after too many loads that did not come."""

Cause = Literal[
    "match", "evicted", "pending", "unloaded", "loaded", "unread", "several", "unreported", "over", "under"
]
"""``match``: within one block. Apart, and never held against the index: ``evicted`` after the choice;
``pending``: another request was computing the same prefix; ``unloaded``: less than the node holds, at
least what the engine has itself: the load failed or was not worth it; ``loaded``: more than was known,
by an engine with a node; ``unread``: the engine does not read its cache for such a request; ``several``
prompts or answers in one request; ``unreported`` by the engine. Held against it: ``over`` and ``under``,
the prediction was above or below the truth."""

Apart = Literal["", "unread", "several"]

CAUSES: tuple[Cause, ...] = (
    "match",
    "evicted",
    "pending",
    "unloaded",
    "loaded",
    "unread",
    "several",
    "unreported",
    "over",
    "under",
)


class Prediction(msgspec.Struct, frozen=True):
    """``cached``: tokens the index says the engine will not compute. ``pending``: the same if all that
    is being computed there were done. ``block``: the engine's block size. All in tokens, for a
    single prompt. ``apart``: why the engine's count says nothing, "" where it does. ``local``: for an
    engine with a node, those of ``cached`` that it has itself."""

    cached: int
    pending: int
    block: int
    apart: Apart = ""
    local: int | None = None


def cacheable(reach: int, prompt_tokens: int, block: int) -> int:
    """Of ``reach`` held tokens, those an engine can count as cached: whole blocks, and never the
    last token, which it must compute to have something to sample from."""
    return min(reach, max(prompt_tokens - 1, 0)) // block * block


def judge(prediction: Prediction, cached: int | None, *, evicted: bool) -> Cause:
    """``cached``: what the engine reported. ``evicted``: some predicted key left it after the choice."""
    if prediction.apart:
        return prediction.apart
    if cached is None:
        return "unreported"
    if abs(cached - prediction.cached) <= prediction.block:
        return "match"
    if cached < prediction.cached:
        if evicted:
            return "evicted"
        served = prediction.local is not None and cached + prediction.block >= prediction.local
        return "unloaded" if served else "over"
    if cached <= prediction.pending + prediction.block:
        return "pending"
    return "under" if prediction.local is None else "loaded"


def agreed(prediction: Prediction, cached: int, cause: Cause) -> bool | None:
    """What this says of the engine's own events; None: nothing, since the node may explain it."""
    if cause == "match":
        local = cached if prediction.local is None else prediction.local
        return True if abs(cached - local) <= prediction.block else None
    return False if cause in ("over", "under") else None


class Loads:
    """Whether a worker's node saves it work, as its answers show. Where loads stay away again and again
    (the connector is missing, the memory cannot be read), the node does not count for ``PAUSE_S``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._outcomes: dict[str, Outcomes] = {}
        self._until: dict[str, float] = {}

    def count(self, worker: str) -> bool:
        """Whether what its node holds counts for this worker now."""
        return self._until.get(worker, float("-inf")) <= self._clock()

    def judged(self, worker: str, prediction: Prediction, cause: Cause) -> None:
        """What came of a prediction that had the node in it."""
        local = prediction.cached if prediction.local is None else prediction.local
        if prediction.cached <= local + prediction.block or cause not in ("match", "unloaded"):
            return
        outcomes = self._outcomes.setdefault(worker, Outcomes())
        outcomes.add(cause == "match")
        if outcomes.complaint:
            outcomes.clear()
            self._until[worker] = self._clock() + PAUSE_S

    def forget(self, worker: str) -> None:
        """It was restarted or is gone."""
        self._outcomes.pop(worker, None)
        self._until.pop(worker, None)
