"""A few daemon threads for work that must not run on the event loop, each piece with a deadline.

Python cannot stop a thread. A piece of work that outlives its deadline is *lost*: its result is
dropped, and another thread takes its thread's place, at most ``spare`` times at once. When all
threads and spares are lost, ``run`` refuses at once instead of waiting. So the worst that runaway
work can do is hold ``threads + spare`` threads; each returns to use when its work ends.
"""

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")

Why = Literal["busy", "late", "failed"]


class Done(msgspec.Struct, Generic[T], frozen=True):
    value: T


class Missed(msgspec.Struct, frozen=True):
    """``busy``: too many were waiting. ``late``: not ready in time. ``failed``: it raised, and
    ``error`` is the name of what it raised (never its text, which may quote a prompt)."""

    why: Why
    error: str = ""


class _Job:
    """Owned by the event loop; ``state`` is guarded by the pool's lock."""

    __slots__ = ("future", "loop", "state", "timer", "work")

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Done[Any] | Missed] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.state: Literal["waiting", "running", "dropped", "replaced", "ended"] = "waiting"

    def settle(self, outcome: Done[Any] | Missed) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(outcome)


class Pool:
    """``threads`` workers, at most ``pending`` pieces waiting. Safe to use from one event loop or several."""

    def __init__(self, name: str, *, threads: int, pending: int, spare: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        """How pieces ended: done, busy, late, failed."""
        self._name, self._pending, self._spare = name, pending, spare
        self._queue: deque[_Job] = deque()
        self._some = threading.Condition()
        self._open = True
        self._waiting = 0
        self._late = 0  # running past their deadline in a thread that nobody replaced
        self._lost = 0  # running past their deadline in a thread that was replaced
        self._threads = threads
        for _ in range(threads):
            self._start()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def lost(self) -> int:
        """Threads held by work that outlived its deadline."""
        return self._lost + self._late

    async def run(self, work: Callable[[], T], deadline_s: float) -> Done[T] | Missed:
        """Run ``work`` in a thread. Returns within ``deadline_s`` plus the loop's own lag.

        If the caller is cancelled, work that has not begun never does.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, loop)
        with self._some:
            if not self._open or self._waiting >= self._pending or self._late >= self._threads:
                self.counts["busy"] += 1
                return Missed("busy")
            self._waiting += 1
            self._queue.append(job)
            self._some.notify()
        job.timer = loop.call_later(deadline_s, self._expire, job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._withdraw(job)
            raise

    def close(self) -> None:
        """Let idle threads end. Waiting work is answered ``busy``; running work is left alone."""
        with self._some:
            self._open = False
            left = list(self._queue)
            self._queue.clear()
            self._waiting = 0
            for job in left:
                job.state = "dropped"
            self._some.notify_all()
        for job in left:
            self._answer(job, Missed("busy"))

    def _withdraw(self, job: _Job) -> None:
        with self._some:
            if job.state == "waiting":
                job.state = "dropped"
                self._waiting -= 1
                if job.timer is not None:
                    job.timer.cancel()

    def _expire(self, job: _Job) -> None:
        with self._some:
            if job.state == "waiting":
                job.state = "dropped"
                self._waiting -= 1
            elif job.state == "running":
                if self._open and self._lost < self._spare:
                    job.state = "replaced"
                    self._lost += 1
                    self._start()
                else:
                    job.state = "dropped"
                    self._late += 1
            else:
                return
            self.counts["late"] += 1
        job.settle(Missed("late"))

    def _start(self) -> None:
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _next(self) -> _Job | None:
        with self._some:
            while True:
                while self._queue:
                    job = self._queue.popleft()
                    if job.state == "waiting":
                        job.state = "running"
                        self._waiting -= 1
                        return job
                if not self._open:
                    return None
                self._some.wait()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            outcome: Done[Any] | Missed
            try:
                outcome = Done(job.work())
            except Exception as error:
                outcome = Missed("failed", type(error).__name__)
            with self._some:
                was, job.state = job.state, "ended"
                if was == "running":
                    self.counts["done" if isinstance(outcome, Done) else "failed"] += 1
                elif was == "dropped":
                    self._late -= 1
                elif was == "replaced":
                    self._lost -= 1
            if was == "running":
                self._answer(job, outcome)
            elif was == "replaced":
                return
            del job, outcome  # a waiting thread holds on to no request

    @staticmethod
    def _answer(job: _Job, outcome: Done[Any] | Missed) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is waiting
            job.loop.call_soon_threadsafe(job.settle, outcome)
