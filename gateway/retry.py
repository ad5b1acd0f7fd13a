"""How often a request may be tried elsewhere, so that a failing fleet is not stormed by retries."""

from collections.abc import Callable

BURST = 10.0


class RetryBudget:
    """A bucket that each request fills by ``share`` and each second by ``floor``; a retry takes one."""

    def __init__(self, share: float, floor: float, clock: Callable[[], float]) -> None:
        self._share, self._floor, self._clock = share, floor, clock
        self._tokens, self._at = BURST, clock()

    def request(self) -> None:
        self._tokens = min(BURST, self._tokens + self._share)

    def take(self) -> bool:
        """True when another attempt may be made now."""
        now = self._clock()
        self._tokens = min(BURST, self._tokens + self._floor * (now - self._at))
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
