"""The words of trust, and what predictions that came true or not say about it."""

from collections import deque
from typing import Literal

Trust = Literal["exact", "syncing", "suspect", "learned"]
"""``exact``: everything the source said is known. ``syncing``: not connected yet, or its history is
being fetched. ``suspect``: something is missing, or predictions failed; what is known still counts.
``learned``: its events cannot be used, only what was routed there."""


class Outcomes:
    """The last ``window`` predictions. ``wrong`` failures among them are too many; ``window``
    successes in a row restore confidence."""

    def __init__(self, window: int = 8, wrong: int = 3) -> None:
        self._window, self._wrong = window, wrong
        self._last: deque[bool] = deque(maxlen=window)
        self._run = 0

    def add(self, agreed: bool) -> None:
        self._last.append(agreed)
        self._run = self._run + 1 if agreed else 0

    @property
    def confident(self) -> bool:
        return self._run >= self._window

    @property
    def complaint(self) -> str:
        """Why they speak against the index, or ""."""
        wrong = self._last.count(False)
        return f"{wrong} of the last {len(self._last)} predictions were wrong" if wrong >= self._wrong else ""

    def clear(self) -> None:
        self._last.clear()
        self._run = 0
