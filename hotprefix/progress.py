"""Progress for people: one line per part, with elapsed seconds. Knows nothing of what is waited for."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

Say = Callable[[str], None]

_REMIND_S = 10.0


def say_to(stream: TextIO) -> Say:
    """Prints a line at once, even into a pipe."""

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    return say


say_error = say_to(sys.stderr)


class Board:
    """Parts that are waited for. Says when each is ready, and every ten seconds which are not."""

    def __init__(self, say: Say, parts: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now = now
        self._start = now()
        self._next_reminder = self._start + _REMIND_S
        self._waiting = list(parts)

    def done(self, part: str, note: str = "") -> None:
        """``part`` is ready."""
        self._waiting.remove(part)
        self._say(f"  {part:<12} ready after {self._now() - self._start:4.0f} s  {note}".rstrip())

    def tick(self) -> None:
        """To be called often; says something only now and then."""
        now = self._now()
        if self._waiting and now >= self._next_reminder:
            self._next_reminder = now + _REMIND_S
            self._say(f"  {', '.join(self._waiting):<12} starting, {now - self._start:3.0f} s …")
