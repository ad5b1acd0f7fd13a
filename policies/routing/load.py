"""What every load-aware policy shares: how loads compare, who is lightest, and a bound on how much a
worker that always reads empty may be given. Knows nothing of caches."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

SPAN = 1024
"""Choices remembered by ``Recent``."""


class Named(Protocol):
    """A candidate, or a policy's view of one."""

    @property
    def worker(self) -> str: ...


One = TypeVar("One", bound=Named)
Weight = Callable[[One], tuple[int, int]]

waiting = attrgetter("queued_tokens", "running")
"""Load as it is compared everywhere: prompt tokens that wait, then requests that run."""

by_name = attrgetter("worker")


def named(candidates: Sequence[One]) -> list[One]:
    """In order of name, so that no decision depends on the order the caller happened to use."""
    return sorted(candidates, key=by_name)


def lightest(candidates: Sequence[One], rng: random.Random, weight: Weight[One] = waiting) -> One:
    """The candidate of least weight; equals are drawn by ``rng``, which is not touched without equals."""
    weights = [weight(candidate) for candidate in candidates]
    least = min(weights)
    if weights.count(least) == 1:
        return candidates[weights.index(least)]
    return rng.choice(
        named([candidate for candidate, one in zip(candidates, weights, strict=True) if one == least])
    )


class Recent:
    """The last ``SPAN`` choices by load alone, to notice a worker that is given much and reads empty.

    A worker that fails at once never holds a lease for long, so it always looks like the best choice.
    Health is not a policy's business, but handing everything to such a worker for ever is. A truly
    fast worker is not hurt: as soon as it has work, it is no longer empty.
    """

    def __init__(self) -> None:
        self._last: deque[str] = deque()
        self._count: dict[str, int] = {}

    def note(self, worker: str) -> None:
        """Remember that ``worker`` was chosen; the oldest choice is forgotten beyond ``SPAN``."""
        self._last.append(worker)
        self._count[worker] = self._count.get(worker, 0) + 1
        if len(self._last) > SPAN:
            oldest = self._last.popleft()
            self._count[oldest] -= 1
            if not self._count[oldest]:
                del self._count[oldest]

    def trim(self, candidates: Sequence[One], weight: Weight[One] = waiting) -> Sequence[One]:
        """The candidates without those that read empty and took three times the even share of recent
        choices (among two or three workers: all but a quarter of an even share). Never empty: shares
        add up to one, and the bound is more than an even share."""
        number = len(candidates)
        counts = [self._count.get(candidate.worker, 0) for candidate in candidates]
        limit = min(3 / number, 1 - 1 / (4 * number)) * max(sum(counts), 8 * number)
        if number == 1 or max(counts) < limit:
            return candidates
        return [
            candidate
            for candidate, count in zip(candidates, counts, strict=True)
            if count < limit or weight(candidate) != (0, 0)
        ]
