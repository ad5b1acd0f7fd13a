"""Copies in background threads, and what came of them.

One thread loads, one stores with a lower priority: a request waits for loads, nobody for stores. The
engine's thread only puts jobs in and takes results out. Lock order: one lock, never held while copying.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from cachenode.connectors.transfer import Place, Transfer
from cachenode.connectors.work import Load, Report, Store

log = logging.getLogger("vllm.hotprefix")

STORE_NICE = 5


class Places(Protocol):
    """Attachments by session; None where the session is gone or cannot be joined. Called by copy threads."""

    def get(self, session: str) -> Place | None: ...


class Results:
    """What ended since the last look. ``loaded``: requests whose load is over; ``bad``: engine blocks of
    them without the right bytes."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.bad: set[int] = set()
        self.report = Report({}, set())


class Jobs:
    """``begun`` is called in a copy thread before its first job, with its kind's niceness. Every load put in
    comes out as loaded once and every store as ended once, after ``close`` too."""

    def __init__(
        self,
        loader: Transfer,
        storer: Transfer,
        places: Places,
        begun: Callable[[int], None] = lambda nice: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._loader, self._storer, self._places, self._begun = loader, storer, places, begun
        self._clock = clock
        self._lock = threading.Condition()
        self._loads: deque[Load | Store] = deque()
        self._stores: deque[Load | Store] = deque()
        self._under_way: list[str] = []
        self._results = Results()
        self._closed = False
        self.errors = 0
        """Copies that ended in an exception: a bug, or a node that names impossible places."""
        self._threads = [
            threading.Thread(target=self._run, args=(kind, nice), name=f"hotprefix-{kind}", daemon=True)
            for kind, nice in (("load", 0), ("store", STORE_NICE))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, loads: list[Load], stores: list[Store]) -> None:
        """Start these; returns at once."""
        if not (loads or stores):
            return
        with self._lock:
            self._loads.extend(loads)
            self._stores.extend(stores)
            self._lock.notify_all()

    def take(self, wait_s: float = 0.0) -> Results:
        """What ended; waits up to ``wait_s`` for something while jobs are under way."""
        with self._lock:
            if wait_s:
                self._lock.wait_for(lambda: self._has_results() or not self._busy(), wait_s)
            results, self._results = self._results, Results()
            return results

    def sessions(self) -> set[str]:
        """Sessions that jobs still need."""
        with self._lock:
            waiting = [job.session for job in (*self._loads, *self._stores)]
            return {*waiting, *self._under_way}

    def close(self) -> None:
        """Ends the threads after the copies under way; what waits is reported as failed."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _has_results(self) -> bool:
        return bool(self._results.loaded or self._results.report.ended)

    def _busy(self) -> bool:
        return bool(self._loads or self._stores or self._under_way)

    def _run(self, kind: str, nice: int) -> None:
        self._begun(nice)
        queue = self._loads if kind == "load" else self._stores
        while True:
            with self._lock:
                self._lock.wait_for(lambda: queue or self._closed)
                if not queue:
                    return
                job = queue.popleft()
                self._under_way.append(job.session)
                skip = self._closed
            start = self._clock()
            try:
                done = set() if skip else self._copy(job)
            except Exception as error:
                self.errors += 1
                log.error("hotprefix: a copy failed: %s: %s", type(error).__name__, error)
                done = set()
            log.debug("hotprefix: %s of %d blocks in %.2f ms", kind, len(done), 1e3 * (self._clock() - start))
            self._note(job, done)

    def _copy(self, job: Load | Store) -> set[int]:
        """The engine blocks that were copied."""
        if isinstance(job, Load) and not job.pieces:
            return set()
        place = self._places.get(job.session)
        if place is None:
            return set()
        done: set[int] = set()
        if isinstance(job, Load):
            for number, piece in enumerate(job.pieces):
                ids = job.blocks[piece.first - job.first : piece.first - job.first + piece.blocks]
                if self._loader.load(place, job.lease, number, piece, ids):
                    done.update(ids)
            return done
        for grant in job.grants:
            ids = job.blocks[grant.first - job.first : grant.first - job.first + grant.blocks]
            if not self._storer.save(place, grant, ids):
                return set()
            done.update(ids)
        return done

    def _note(self, job: Load | Store, done: set[int]) -> None:
        with self._lock:
            self._under_way.remove(job.session)
            if isinstance(job, Load):
                self._results.loaded.add(job.request)
                self._results.bad.update(set(job.blocks) - done)
            else:
                self._results.report.ended[job.job] = 1
                if not done:
                    self._results.report.failed.add(job.job)
            self._lock.notify_all()
