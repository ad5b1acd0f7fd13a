"""The committed records: found through the directory, kept in the arena, let go by the eviction policy.

*Order:* ``stored`` is said after a record can be found, ``removed`` before its space is given out again.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Space
from cachenode.coming import Reservation
from cachenode.directory import Directory
from cachenode.record import Layout, moved, realm
from cachenode.records import Records
from cachenode.wire import Piece
from policies.eviction.base import Eviction, Item

SLICE = 64
"""Records forgotten in one call of ``work``."""
MAX_REALMS = 65_536


class Sink(Protocol):
    """Hears what can be served. ``keys``: packed, one an engine block of ``block_tokens`` tokens."""

    def stored(self, fingerprint: str, block_tokens: int, keys: bytes) -> None: ...
    def removed(self, fingerprint: str, block_tokens: int, keys: bytes) -> None: ...


class Realm(msgspec.Struct, frozen=True):
    """A layout with an adapter. ``mask`` moves keys to places and back."""

    fingerprint: str
    block_tokens: int
    mask: bytes


class Holdings:
    """See the module. A record is named by its slot in the directory."""

    def __init__(self, space: Space, directory: Directory, eviction: Eviction, sink: Sink) -> None:
        self.space, self.directory, self.records = space, directory, Records(space)
        self.realms: list[Realm] = []
        self.blocks = 0
        """That can be found."""
        self.counters: Counter[str] = Counter()
        self._eviction, self._sink = eviction, sink
        self._realm_ids: dict[tuple[str, str], int] = {}
        self._clearing: deque[tuple[str | None, int, int]] = deque()
        self._dropped: set[int] = set()
        self._serial = 0

    def realm(self, layout: Layout, fingerprint: str, adapter: str) -> int:
        """The number of a realm. Raises ValueError for one more than there may be."""
        known = self._realm_ids.get((fingerprint, adapter))
        if known is None:
            if len(self.realms) >= MAX_REALMS:
                raise ValueError(f"at most {MAX_REALMS} layouts and adapters are kept in one life of a node")
            known = self._realm_ids[fingerprint, adapter] = len(self.realms)
            self.realms.append(Realm(fingerprint, layout.block_tokens, realm(fingerprint, adapter)))
        return known

    def about(self, slot: int) -> Realm:
        return self.realms[self.records.realm[slot]]

    # ---- coming and going ----

    def keep(self, reservation: Reservation) -> bool:
        """Makes it a record; False, and its passages still the caller's, where the directory is full of
        what may not go."""
        parent, generation = reservation.parent
        if parent < 0 or self.directory.generation(parent) != generation:
            parent = self.directory.ending(reservation.before) if reservation.before else -1
        held = {parent} if parent >= 0 else set[int]()
        found = self.directory.add(reservation.places, reservation.proofs)
        while found is None and self._evict(held, 1):
            found = self.directory.add(reservation.places, reservation.proofs)
        if found is None:
            self.counters["directory_full"] += 1
            return False
        self._serial += 1
        slot, about = found.slot, self.realms[reservation.realm]
        self.records.put(slot, reservation.passages, reservation.size, reservation.realm, self._serial)
        tokens = about.block_tokens
        first, length = reservation.first * tokens, reservation.blocks * tokens
        name = reservation.places[:KEY_BYTES]
        self._eviction.add(Item(slot, name, parent, reservation.size, first, length))
        self.blocks += reservation.blocks
        self.counters["stored_records"] += 1
        self.counters["stored_blocks"] += reservation.blocks
        self.counters["stored_bytes"] += reservation.size
        self._sink.stored(about.fingerprint, tokens, moved(reservation.places, about.mask))
        return True

    def lend(self, slot: int, first: int, blocks: int, start: int) -> Piece:
        """Blocks of it are read from now on, until ``give_back``."""
        of = len(self.directory.places(slot)) // KEY_BYTES
        generation = self.directory.generation(slot)
        self.records.readers(slot, 1)
        self._eviction.use(slot)
        return Piece(slot, generation, first, blocks, start, of, self.records.passages(slot))

    def give_back(self, slot: int, *, lost: bool = False) -> None:
        """One reader less, or one of those that were given up by ``lose``."""
        (self.records.lost if lost else self.records.readers)(slot, -1)
        self._let_go(slot)

    def lose(self, slot: int) -> None:
        """One of its readers is not heard of any more, and may be reading still."""
        self.records.readers(slot, -1)
        self.records.lost(slot, 1)

    def expect(self, reservation: Reservation, more: int) -> None:
        """Its parent must stay until it is committed or given up, or nobody could find it."""
        slot, _ = reservation.parent
        if slot >= 0:
            self.records.expect(slot, more)
            self._let_go(slot)

    def room(self, block: int, wanted: int, protected: set[int]) -> int:
        """Makes room for as many of ``wanted`` blocks of so many bytes as can be had, in one record; how
        many. ``protected`` ones and what they need stay."""
        size = self.space.rounded(block * wanted)
        if self.space.free_bytes < size:
            self._evict(protected, size - self.space.free_bytes)
        return min(wanted, self.space.free_bytes // block)

    def _evict(self, protected: set[int], size: int) -> bool:
        """Until so many bytes more are free, or all that may go is gone; whether anything went."""
        goal = self.space.free_bytes + size
        went = False
        for slot in self._eviction.victims(lambda slot: slot in protected or self.records.needed(slot)):
            self._drop(slot)
            self.counters["evicted_records"] += 1
            went = True
            if self.space.free_bytes >= goal:
                break
        return went

    def _drop(self, slot: int) -> None:
        """Nobody finds it any more; freed now or when its last reader is gone."""
        about, places = self.about(slot), self.directory.places(slot)
        self._sink.removed(about.fingerprint, about.block_tokens, moved(places, about.mask))
        self.directory.hide(slot)
        self._eviction.remove(slot)
        self.blocks -= len(places) // KEY_BYTES
        self._dropped.add(slot)
        self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        if slot in self._dropped and not self.records.needed(slot):
            self._dropped.remove(slot)
            self.space.free(self.records.take(slot))
            self.directory.vacate(slot)

    # ---- forgetting, pinning, telling ----

    def clear(self, fingerprint: str | None) -> int:
        """Everything of this layout (None: all) that is held now goes, in slices of ``work``; how many
        records there are."""
        self._clearing.append((fingerprint, 0, self._serial))
        return sum(
            self._concerns(slot, fingerprint, self._serial) for slot in range(len(self.records.serial))
        )

    def work(self) -> bool:
        """A slice of what was put off; whether there is more."""
        if not self._clearing:
            return False
        fingerprint, at, until = self._clearing[0]
        end = min(len(self.records.serial), at + SLICE)
        for slot in range(at, end):
            if self._concerns(slot, fingerprint, until):
                self.records.unpin_all(slot)
                self._drop(slot)
        self._clearing[0] = (fingerprint, end, until)
        if end >= len(self.records.serial):
            self._clearing.popleft()
        return bool(self._clearing)

    def _concerns(self, slot: int, fingerprint: str | None, until: int) -> bool:
        return (
            0 < self.records.serial[slot] <= until
            and slot not in self._dropped
            and fingerprint in (None, self.about(slot).fingerprint)
        )

    def pin(self, fingerprint: str, keys: bytes, adapter: str, more: int) -> int:
        """Keep the records of this prefix (keys of its engine blocks from the start on) until they are
        unpinned with ``more`` -1; how many of its leading blocks that are."""
        places, at = moved(keys, realm(fingerprint, adapter)), 0
        while at * KEY_BYTES < len(places):
            found = self.directory.at(places, None, at)
            if not found.blocks or not self.records.pin(found.slot, more):
                break
            at += found.blocks
        return at

    def held(self) -> Iterator[tuple[str, int, bytes]]:
        """All records that can be found: fingerprint, tokens a block, keys. There may be changes between
        two of them."""
        slot = 0
        while slot < len(self.records.serial):
            if self.records.serial[slot] and slot not in self._dropped:
                about = self.about(slot)
                yield about.fingerprint, about.block_tokens, moved(self.directory.places(slot), about.mask)
            slot += 1

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        for part in (self.space, self.directory, self.records, self._eviction):
            part.check_integrity()
        slots = self.records.slots()
        assert len(slots) == self.directory.records + len(self._dropped)
        findable = (slot for slot in slots if slot not in self._dropped)
        assert self.blocks == sum(len(self.directory.places(slot)) // KEY_BYTES for slot in findable)
