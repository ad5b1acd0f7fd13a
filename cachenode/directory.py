"""Which prefixes can be read now: one table in shared memory, with one writer and readers without locks.

An entry stands for a record. A hash table leads from the *place* of a record's first block (and, for the
writer alone, from that of its last) to the entry, the entry to its row: all places of the record, then all
its proofs. Readers in other processes may meet the table in the middle of a change: they compare whole places
and proofs, and an entry's generation before and after; so they may miss what is there, and never find what is
not. A generation is odd while its entry is empty or being changed, and never comes twice.
"""

import struct
from typing import NamedTuple

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Space
from cachenode.record import PROOF_BYTES

MAGIC = b"hotpfx\x00\x01"
_HEAD = struct.Struct("<8sQQQ")
_ENTRY = struct.Struct("<QQQ")  # generation, offset of the row, blocks
_HEADER_BYTES = 4096
_ROW_UNIT = 64
_LAST = 1 << 31
_INDEX = _LAST - 1
_MOST_PROBES = 4096
Buffer = memoryview


class Sizes(NamedTuple):
    """Of a directory: hash slots (a power of two), entries, bytes of rows; all from what it shall hold."""

    slots: int
    entries: int
    rows: int

    @classmethod
    def of(cls, records: int, blocks: int) -> "Sizes":
        """For so many records of together so many blocks."""
        slots = 1 << max(6, (3 * records).bit_length())
        rows = blocks * (KEY_BYTES + PROOF_BYTES) + records * _ROW_UNIT
        return cls(slots, records, -(-rows // _HEADER_BYTES) * _HEADER_BYTES)

    @property
    def bytes(self) -> int:
        return self.rows_at + self.rows

    @property
    def entries_at(self) -> int:
        return _HEADER_BYTES + 8 * self.slots

    @property
    def rows_at(self) -> int:
        return -(-(self.entries_at + _ENTRY.size * self.entries) // _HEADER_BYTES) * _HEADER_BYTES


class Found(NamedTuple):
    """Where a walk stands: an entry and how many of the asked blocks it agrees with, from the first on.
    ``slot`` -1: no record begins here. ``blocks`` 0 with a slot: the same place, but another proof."""

    slot: int
    blocks: int
    generation: int


_NOTHING = Found(-1, 0, 1)


class DirectoryView:
    """What a reader sees. Raises ValueError for memory that is no directory of this version."""

    def __init__(self, buffer: Buffer) -> None:
        magic, slots, entries, rows = _HEAD.unpack_from(buffer, 0)
        sizes = Sizes(slots, entries, rows)
        if magic != MAGIC or slots & (slots - 1) or not slots or sizes.bytes > len(buffer):
            raise ValueError("the memory handed over is no directory of this version of hotprefix")
        self._sizes = sizes
        self._buffer = buffer
        self._slots: memoryview[int] = buffer[_HEADER_BYTES : sizes.entries_at].cast("Q")
        self._mask = slots - 1

    def match(self, places: bytes, proofs: bytes) -> int:
        """How many leading blocks of these can be read now. ``places``: 16 bytes a block, ``proofs``: 32."""
        at, total = 0, len(places) // KEY_BYTES
        while at < total:
            found = self.at(places, proofs, at)
            if not found.blocks:
                break
            at += found.blocks
        return at

    def check(self, slot: int, generation: int) -> bool:
        """Whether the entry still holds the record it held when it had this generation."""
        return 0 <= slot < self._sizes.entries and self._entry(slot)[0] == generation

    def at(self, places: bytes, proofs: bytes | None, at: int) -> Found:
        """The record that begins at block number ``at`` of these; without ``proofs`` places alone count."""
        place = places[KEY_BYTES * at : KEY_BYTES * (at + 1)]
        slot = self._find(place, 0)
        if slot < 0:
            return _NOTHING
        generation, row, blocks = self._entry(slot)
        if generation & 1:
            return _NOTHING
        asked = min(blocks, len(places) // KEY_BYTES - at)
        agreed = _equal(places, at, bytes(self._buffer[row : row + KEY_BYTES * asked]), KEY_BYTES)
        if proofs is not None and agreed:
            row += KEY_BYTES * blocks
            agreed = _equal(proofs, at, bytes(self._buffer[row : row + PROOF_BYTES * agreed]), PROOF_BYTES)
        if self._entry(slot)[0] != generation:
            return _NOTHING
        return Found(slot, agreed, generation)

    def _entry(self, slot: int) -> tuple[int, int, int]:
        entry: tuple[int, int, int] = _ENTRY.unpack_from(
            self._buffer, self._sizes.entries_at + _ENTRY.size * slot
        )
        return entry

    def _find(self, place: bytes, kind: int) -> int:
        """The entry whose first (``kind`` 0) or last place (``_LAST``) this is, or -1."""
        slots, mask = self._slots, self._mask
        home = int.from_bytes(place[:8], "little")
        tag = home >> 32
        for probe in range(home, home + _MOST_PROBES):
            word: int = slots[probe & mask]
            if not word:
                return -1
            if word >> 32 == tag and word & _LAST == kind:
                slot = (word & _INDEX) - 1
                if slot < self._sizes.entries and self._place(slot, kind) == place:
                    return slot
        return -1

    def _place(self, slot: int, kind: int) -> bytes:
        _, row, blocks = self._entry(slot)
        if kind and blocks:
            row += KEY_BYTES * (blocks - 1)
        return bytes(self._buffer[row : row + KEY_BYTES])


def _equal(asked: bytes, at: int, held: bytes, width: int) -> int:
    """How many leading fields of ``held`` are those of ``asked`` from field number ``at`` on."""
    start = width * at
    if asked[start : start + len(held)] == held:
        return len(held) // width
    for field in range(0, len(held), width):
        if asked[start + field : start + field + width] != held[field : field + width]:
            return field // width
    return len(held) // width


class Directory(DirectoryView):
    """The writer's. ``buffer`` is zeroed memory of ``sizes.bytes``.

    A record's life: ``add`` makes it findable, ``hide`` takes that back, ``vacate`` frees its entry.
    """

    def __init__(self, buffer: Buffer, sizes: Sizes) -> None:
        _HEAD.pack_into(buffer, 0, MAGIC, *sizes)
        super().__init__(buffer)
        self._space = Space(sizes.rows, _ROW_UNIT)
        self._fresh = 0
        self._vacant: list[int] = []
        self.records = 0
        """Findable ones."""

    @property
    def full(self) -> bool:
        """Whether no entry is left."""
        return not self._vacant and self._fresh >= self._sizes.entries

    @property
    def entries(self) -> int:
        """Entries that were ever used: slots are below this."""
        return self._fresh

    def add(self, places: bytes, proofs: bytes) -> Found | None:
        """A new record, whose first place no other has; None where the directory is full."""
        data = places + proofs
        row = None if self.full else self._space.run(len(data))
        if row is None:
            return None
        row += self._sizes.rows_at
        if self._vacant:
            slot = self._vacant.pop()
        else:
            slot, self._fresh = self._fresh, self._fresh + 1
        blocks = len(places) // KEY_BYTES
        self._buffer[row : row + len(data)] = data
        generation = (self._entry(slot)[0] | 1) + 1
        at = self._sizes.entries_at + _ENTRY.size * slot
        _ENTRY.pack_into(self._buffer, at, generation - 1, row, blocks)
        struct.pack_into("<Q", self._buffer, at, generation)
        self._insert(places[:KEY_BYTES], slot, 0)
        self._insert(places[-KEY_BYTES:], slot, _LAST)
        self.records += 1
        return Found(slot, blocks, generation)

    def hide(self, slot: int) -> None:
        """Nobody finds it from now on; its generation is over, its entry stays taken."""
        generation, row, blocks = self._entry(slot)
        assert not generation & 1, "hidden twice"
        at = self._sizes.entries_at + _ENTRY.size * slot
        struct.pack_into("<Q", self._buffer, at, generation + 1)
        self._delete(self._place(slot, 0), slot, 0)
        self._delete(self._place(slot, _LAST), slot, _LAST)
        size = blocks * (KEY_BYTES + PROOF_BYTES)
        self._space.free([(row - self._sizes.rows_at, size)])
        _ENTRY.pack_into(self._buffer, at, generation + 1, 0, 0)
        self.records -= 1

    def vacate(self, slot: int) -> None:
        """The entry of a hidden record may be used again."""
        self._vacant.append(slot)

    def begins(self, place: bytes) -> bool:
        """Whether a record's first block is this."""
        return self._find(place, 0) >= 0

    def ending(self, place: bytes) -> int:
        """The record whose last block this is, or -1."""
        return self._find(place, _LAST)

    def generation(self, slot: int) -> int:
        return self._entry(slot)[0]

    def places(self, slot: int) -> bytes:
        """All places of a findable record."""
        _, row, blocks = self._entry(slot)
        return bytes(self._buffer[row : row + KEY_BYTES * blocks])

    # ---- the hash table: linear probing, holes closed by moving what follows back ----

    def _insert(self, place: bytes, slot: int, kind: int) -> None:
        home = int.from_bytes(place[:8], "little")
        probe = home
        while self._slots[probe & self._mask]:
            probe += 1
        self._slots[probe & self._mask] = home >> 32 << 32 | kind | slot + 1

    def _delete(self, place: bytes, slot: int, kind: int) -> None:
        slots, mask = self._slots, self._mask
        word = int.from_bytes(place[:8], "little") >> 32 << 32 | kind | slot + 1
        hole = int.from_bytes(place[:8], "little") & mask
        while slots[hole] != word:
            hole = hole + 1 & mask
        probe = hole
        while True:
            probe = probe + 1 & mask
            word = slots[probe]
            if not word:
                break
            mine = self._place((word & _INDEX) - 1, word & _LAST)
            home = int.from_bytes(mine[:8], "little") & mask
            if probe - home & mask >= probe - hole & mask:
                slots[hole] = word
                hole = probe
        slots[hole] = 0

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        self._space.check_integrity()
        words = [word for word in self._slots if word]
        live = [slot for slot in range(self._fresh) if not self._entry(slot)[0] & 1]
        assert len(live) == self.records
        assert sorted((word & _INDEX) - 1 for word in words) == sorted(live * 2)
        rows = sum(self._space.rounded(self._entry(slot)[2] * (KEY_BYTES + PROOF_BYTES)) for slot in live)
        assert rows + self._space.free_bytes == self._space.total_bytes
        for slot in live:
            places = self.places(slot)
            assert self._find(places[:KEY_BYTES], 0) >= 0
            assert self.ending(places[-KEY_BYTES:]) >= 0
        assert len(set(self._vacant)) == len(self._vacant)
        assert not set(self._vacant) & set(live)
