"""Time for the simulation: real, or moved by hand."""

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None:
        """Return once ``now`` has advanced by ``seconds``; at once for zero or less."""


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)


class HandClock:
    """Time that moves only by ``advance``. For engines on the caller's own loop."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._order, future))
        await future

    @property
    def sleepers(self) -> int:
        """How many wait for time to move: a test waits for this before it advances."""
        return sum(1 for _, _, future in self._sleepers if not future.done())

    async def advance(self, seconds: float) -> None:
        """Move time, waking sleepers in order of their time, each with a few turns of the loop."""
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            at, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)
            if not future.done():
                future.set_result(None)
                for _ in range(8):
                    await asyncio.sleep(0)
        self._now = end
