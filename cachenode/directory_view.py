"""Which prefixes can be read now: one table in shared memory, with one writer and readers without locks.

An entry stands for a record. A hash table leads from the *place* of a record's first block (and, for the
writer alone, from that of its last) to the entry, the entry to its row: all places of the record, then all
its proofs. Readers in other processes may meet the table in the middle of a change: they compare whole places
and proofs, and an entry's generation before and after; so they may miss what is there, and never find what is
not. A generation is odd while its entry is empty or being changed, and never comes twice; 0 is that of an
entry never used, to which no word of the hash table leads. Writes are in the order of the code: x86 keeps it.
"""

import struct
from typing import NamedTuple

from cacheindex.keys import KEY_BYTES
from cachenode.record import PROOF_BYTES

MAGIC = b"hotpfx\x00\x01"
HEAD = struct.Struct("<8sQQQ")
ENTRY_BYTES = 24
HEADER_BYTES = 4096
ROW_UNIT = 64
LAST = 1 << 31
"""Marks, in a word of the hash table, the place of a last block."""
INDEX = LAST - 1
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
        rows = blocks * (KEY_BYTES + PROOF_BYTES) + records * ROW_UNIT
        return cls(slots, records, -(-rows // HEADER_BYTES) * HEADER_BYTES)

    @property
    def bytes(self) -> int:
        return self.rows_at + self.rows

    @property
    def entries_at(self) -> int:
        return HEADER_BYTES + 8 * self.slots

    @property
    def rows_at(self) -> int:
        return -(-(self.entries_at + ENTRY_BYTES * self.entries) // HEADER_BYTES) * HEADER_BYTES


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
        magic, slots, entries, rows = HEAD.unpack_from(buffer, 0)
        sizes = Sizes(slots, entries, rows)
        if magic != MAGIC or slots & (slots - 1) or not slots or sizes.bytes > len(buffer):
            raise ValueError("the memory handed over is no directory of this version of hotprefix")
        self._sizes = sizes
        self._buffer = buffer
        self._slots: memoryview[int] = buffer[HEADER_BYTES : sizes.entries_at].cast("Q")
        self._mask = slots - 1
        self._entries = entries
        end = sizes.entries_at + ENTRY_BYTES * entries
        self._words: memoryview[int] = buffer[sizes.entries_at : end].cast("Q")
        """Of each entry its generation, the offset of its row, its blocks: read and written as whole words,
        so that no reader sees half of one."""

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
        if not 0 <= slot < self._entries:
            return False
        return self._words[3 * slot] == generation

    def at(self, places: bytes, proofs: bytes | None, at: int) -> Found:
        """The record that begins at block number ``at`` of these; without ``proofs`` places alone count."""
        entry = self._find(places[KEY_BYTES * at : KEY_BYTES * (at + 1)], 0)
        if entry is None:
            return _NOTHING
        slot, generation, row, blocks = entry
        if generation & 1:
            return _NOTHING
        asked = min(blocks, len(places) // KEY_BYTES - at)
        agreed = _equal(places, at, bytes(self._buffer[row : row + KEY_BYTES * asked]), KEY_BYTES)
        if proofs is not None and agreed:
            row += KEY_BYTES * blocks
            agreed = _equal(proofs, at, bytes(self._buffer[row : row + PROOF_BYTES * agreed]), PROOF_BYTES)
        if not self.check(slot, generation):
            return _NOTHING
        return Found(slot, agreed, generation)

    def _entry(self, slot: int) -> tuple[int, int, int]:
        words, at = self._words, 3 * slot
        return words[at], words[at + 1], words[at + 2]

    def _find(self, place: bytes, kind: int) -> tuple[int, int, int, int] | None:
        """The slot and entry whose first (``kind`` 0) or last place (``LAST``) this is."""
        slots, mask, buffer = self._slots, self._mask, self._buffer
        home = int.from_bytes(place[:8], "little")
        tag = home >> 32
        for probe in range(home, home + _MOST_PROBES):
            word: int = slots[probe & mask]
            if not word:
                return None
            if word >> 32 == tag and word & LAST == kind:
                slot = (word & INDEX) - 1
                if slot < self._entries:
                    generation, row, blocks = self._entry(slot)
                    at = row + KEY_BYTES * (blocks - 1) if kind else row
                    if buffer[at : at + KEY_BYTES] == place:
                        return slot, generation, row, blocks
        return None


def _equal(asked: bytes, at: int, held: bytes, width: int) -> int:
    """How many leading fields of ``held`` are those of ``asked`` from field number ``at`` on."""
    start = width * at
    if asked[start : start + len(held)] == held:
        return len(held) // width
    for field in range(0, len(held), width):
        if asked[start + field : start + field + width] != held[field : field + width]:
            return field // width
    return len(held) // width
