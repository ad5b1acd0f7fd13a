"""What one cache node holds and says of itself: its events turned into changes of the table.

No I/O, no clock. Events wait in a queue and enter the table in steps, so that a node that tells of a
million blocks at once keeps nobody else waiting. Bounded in layouts, keys and names: a node that says
more than a node can is believed less, and counted.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from cacheindex.events import TIERS, Batch, Cleared, Heartbeat, Removed, Stored, Tier
from cacheindex.keys import BLOCK_TOKENS, KEY_BYTES, unpack_keys
from cacheindex.table import Slot, Table

MAX_KEYS = 4_000_000
MAX_SLOTS = 256
MAX_STRIDE = 65_536
MAX_NAME = 128
MAX_SERVES = 4096

Change = Stored | Removed | Cleared


class Facts(msgspec.Struct, frozen=True):
    """A heartbeat as it is believed. ``fill``: bytes used, ``rates``: bytes per second, by tier.
    ``serves``: the layouts of each worker that the node works for."""

    fill: dict[Tier, int] = {}
    rates: dict[Tier, float] = {}
    serves: Mapping[str, frozenset[str]] = {}


class NodeState:
    """``skipped`` counts, by cause, what is passed over. ``keys`` is how many the table has of the node,
    or somewhat more since the last ``recount``."""

    def __init__(self, name: str, skipped: Counter[str], max_keys: int = MAX_KEYS) -> None:
        self.facts = Facts()
        self._name, self._skipped, self._max_keys = name, skipped, max_keys
        self.keys = 0
        self._slots: set[Slot] = set()
        self._queue: deque[Change] = deque()
        self._offset = 0
        self._recounted = False

    @property
    def busy(self) -> bool:
        """Whether ``work`` has something to do."""
        return bool(self._queue)

    def take(self, batch: Batch) -> None:
        """Queue what the batch says of keys. Its heartbeats are the business of ``hear``."""
        for event in batch.events:
            if not isinstance(event, Heartbeat) and self._fits(event):
                self._queue.append(event)

    def hear(self, beat: Heartbeat) -> None:
        """What the node says of itself now."""
        serves: dict[str, set[str]] = {}
        for worker, layout in beat.serves[:MAX_SERVES]:
            if len(worker) <= MAX_NAME and len(layout) <= MAX_NAME:
                serves.setdefault(worker, set()).add(layout)
        self.facts = Facts(
            fill={tier: beat.fill[tier] for tier in TIERS if 0 <= beat.fill.get(tier, -1) < 2**63},
            rates={tier: beat.rates[tier] for tier in TIERS if _is_rate(beat.rates.get(tier, -1.0))},
            serves={worker: frozenset(layouts) for worker, layouts in serves.items()},
        )

    def silence(self) -> None:
        """What it said of itself is void."""
        self.facts = Facts()

    def forget(self, table: Table) -> None:
        """It holds nothing that we know of."""
        self._queue.clear()
        self._offset = 0
        self.keys = 0
        self._slots.clear()
        table.forget(self._name)

    def recount(self, table: Table) -> None:
        """Ask the table: a node may say twice what it holds, and the table drops keys when it is full."""
        held = table.held_by(self._name)
        self.keys = sum(held.values())
        self._slots = {slot for slot, keys in held.items() if keys}

    def work(self, table: Table, most: int) -> bool:
        """Carry out queued events, about ``most`` keys of them. True while there are more."""
        self._recounted = False
        while self._queue and most > 0:
            event = self._queue[0]
            if isinstance(event, Cleared):
                self._done()
                self._clear(table, event)
                most -= 1
                continue
            slot = Slot(self._name, event.tier, event.layout, event.stride)
            end = self._offset + most * KEY_BYTES
            keys = unpack_keys(event.keys[self._offset : end])
            self._offset = end
            if end >= len(event.keys):
                self._done()
            most -= len(keys) + 1
            if isinstance(event, Stored):
                self._store(table, slot, keys)
            else:
                table.remove(slot, keys)
        return bool(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself."""
        assert len(self._slots) <= MAX_SLOTS, "too many slots"
        assert self.keys <= self._max_keys, "too many keys"
        assert self._offset == 0 or self._queue, "half an event without the event"

    # ---- inside ----

    def _fits(self, event: Change) -> bool:
        stride = event.stride
        if stride % BLOCK_TOKENS or not BLOCK_TOKENS <= stride <= MAX_STRIDE or len(event.layout) > MAX_NAME:
            self._skipped["no_such_slot"] += 1
            return False
        return True

    def _done(self) -> None:
        self._queue.popleft()
        self._offset = 0

    def _clear(self, table: Table, event: Cleared) -> None:
        """All of a layout, whatever the strides it was told with."""
        for slot in [one for one in self._slots if (one.tier, one.layout) == (event.tier, event.layout)]:
            self._slots.discard(slot)
            table.clear(slot)

    def _store(self, table: Table, slot: Slot, keys: list[bytes]) -> None:
        if self._is_full(slot, len(keys)) and not self._recounted:
            self._recounted = True
            self.recount(table)
        if slot not in self._slots and len(self._slots) >= MAX_SLOTS:
            self._skipped["too_many_slots"] += 1
            return
        room = max(0, self._max_keys - self.keys)
        if len(keys) > room:
            self._skipped["too_many_keys"] += len(keys) - room
            del keys[room:]
        if keys:
            self._slots.add(slot)
            self.keys += len(keys)
            table.store(slot, keys)

    def _is_full(self, slot: Slot, more: int) -> bool:
        return self.keys + more > self._max_keys or (
            slot not in self._slots and len(self._slots) >= MAX_SLOTS
        )


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and value >= 0
