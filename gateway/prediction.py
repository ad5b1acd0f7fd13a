"""Prediction against truth: what an engine should report as cached, and what a difference means."""

from typing import Literal

import msgspec

Cause = Literal["match", "evicted", "pending", "unread", "several", "unreported", "over", "under"]
"""``match``: within one block. Apart, and never held against the index: ``evicted`` after the choice;
``pending``: another request was computing the same prefix; ``unread``: the engine does not read its
cache for such a request; ``several`` prompts or answers in one request; ``unreported`` by the engine. Held
against it: ``over`` and ``under``, the prediction was above or below the truth."""

Apart = Literal["", "unread", "several"]

CAUSES: tuple[Cause, ...] = (
    "match",
    "evicted",
    "pending",
    "unread",
    "several",
    "unreported",
    "over",
    "under",
)


class Prediction(msgspec.Struct, frozen=True):
    """``cached``: tokens the index says the engine will not compute. ``pending``: the same if all that
    is being computed there were done. ``block``: the engine's block size. All in tokens, for a
    single prompt. ``apart``: why the engine's count says nothing, "" where it does."""

    cached: int
    pending: int
    block: int
    apart: Apart = ""


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
        return "evicted" if evicted else "over"
    return "pending" if cached <= prediction.pending + prediction.block else "under"
