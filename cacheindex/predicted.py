"""What was routed where and is not known to be computed yet: it keeps simultaneous twins together.

A ticket says that a worker is computing, or has computed, a prompt; it counts until its deadline,
and all of a prompt's keys count with it. The same structure with long deadlines is the routing
history of workers without events. Belongs to one thread; time comes in and never runs backwards.
"""

import heapq
from collections.abc import Sequence

from cacheindex.keys import BLOCK_TOKENS

MAX_KEYS = 4_000_000


class _Ticket:
    __slots__ = ("deadline", "keys", "worker")

    def __init__(self, worker: str, keys: tuple[bytes, ...], deadline: float) -> None:
        self.worker, self.keys, self.deadline = worker, keys, deadline


class Predicted:
    """Bounded: when the tickets' keys together exceed ``max_keys``, those that would expire
    first are dropped, and counted in ``dropped``."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.dropped = 0
        self._max_keys = max_keys
        self._held = 0
        self._next = 0
        self._tickets: dict[int, _Ticket] = {}
        self._due: list[tuple[float, int]] = []
        self._entries: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        """Tickets that count."""
        return len(self._tickets)

    @property
    def keys_held(self) -> int:
        """Keys of all tickets, each counted once a ticket."""
        return self._held

    def put(self, worker: str, keys: Sequence[bytes], deadline: float) -> int:
        """``worker`` is going to hold ``keys``, *all* the keys of a prompt from its first one, or
        of its beginning. Returns the ticket. A prompt longer than the bound is cut."""
        ticket, self._next = self._next, self._next + 1
        kept = tuple(keys[: self._max_keys])
        self._tickets[ticket] = _Ticket(worker, kept, deadline)
        self._push(deadline, ticket)
        self._held += len(kept)
        for key in kept:
            workers = self._entries.get(key)
            if workers is None:
                self._entries[key] = {worker: 1}
            else:
                workers[worker] = workers.get(worker, 0) + 1
        while self._held > self._max_keys:
            self.dropped += self._pop_first()
        return ticket

    def confirm(self, ticket: int, deadline: float) -> bool:
        """Count this ticket until ``deadline`` instead. False when it is gone already."""
        known = self._tickets.get(ticket)
        if known is None:
            return False
        known.deadline = deadline
        self._push(deadline, ticket)
        return True

    def drop(self, ticket: int) -> bool:
        """The prediction did not come true. False when the ticket is gone already."""
        known = self._tickets.pop(ticket, None)
        if known is None:
            return False
        self._held -= len(known.keys)
        self._tidy()
        for key in known.keys:
            workers = self._entries[key]
            count = workers[known.worker] - 1
            if count:
                workers[known.worker] = count
            else:
                del workers[known.worker]
                if not workers:
                    del self._entries[key]
        return True

    def drop_worker(self, worker: str) -> int:
        """Drop all tickets of a worker that restarted or left; how many there were."""
        tickets = [ticket for ticket, known in self._tickets.items() if known.worker == worker]
        for ticket in tickets:
            self.drop(ticket)
        return len(tickets)

    def match(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """Tokens of this prompt, from its start, that each worker is predicted to hold at ``now``.
        A ticket counts while ``now`` is before its deadline. Workers with none are left out."""
        self.expire(now)
        if not keys:
            return {}
        return {worker: self._reach(keys, worker) for worker in self._entries.get(keys[0], ())}

    def _reach(self, keys: Sequence[bytes], worker: str) -> int:
        # Tickets cover whole beginnings of prompts, so "held" changes once along the keys.
        low, high = 0, len(keys)
        while high - low > 1:
            middle = (low + high) // 2
            if worker in self._entries.get(keys[middle], ()):
                low = middle
            else:
                high = middle
        return (low + 1) * BLOCK_TOKENS

    def expire(self, now: float) -> int:
        """Drop what is due at ``now``; how many tickets that were. ``match`` does it by itself."""
        gone = 0
        while self._due and self._due[0][0] <= now:
            gone += self._pop_first()
        return gone

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. Walks everything: for tests."""
        counted: dict[bytes, dict[str, int]] = {}
        for known in self._tickets.values():
            for key in known.keys:
                workers = counted.setdefault(key, {})
                workers[known.worker] = workers.get(known.worker, 0) + 1
        due = set(self._due)
        held = sum(len(known.keys) for known in self._tickets.values())
        for holds, what in (
            (counted == self._entries, "counts of tickets by key and worker"),
            (held == self._held <= self._max_keys, "the number of keys held"),
            (all((known.deadline, ticket) in due for ticket, known in self._tickets.items()), "deadlines"),
            (len(self._due) <= 2 * len(self._tickets) + 32, "outdated deadlines are kept"),
        ):
            if not holds:
                raise AssertionError(f"predicted entries: wrong {what}")

    def _push(self, deadline: float, ticket: int) -> None:
        heapq.heappush(self._due, (deadline, ticket))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._due) > 2 * len(self._tickets) + 32:
            self._due = [(known.deadline, number) for number, known in self._tickets.items()]
            heapq.heapify(self._due)

    def _pop_first(self) -> int:
        deadline, ticket = heapq.heappop(self._due)
        known = self._tickets.get(ticket)
        # A deadline that was changed later leaves its old place behind.
        if known is None or known.deadline != deadline:
            return 0
        return int(self.drop(ticket))
