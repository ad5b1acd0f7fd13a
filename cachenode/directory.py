"""The directory's writer: records come and go, in the order that readers without locks need."""

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Space
from cachenode.directory_view import (
    HEAD,
    INDEX,
    LAST,
    MAGIC,
    ROW_UNIT,
    Buffer,
    DirectoryView,
    Found,
    Sizes,
)
from cachenode.record import PROOF_BYTES


class Directory(DirectoryView):
    """The writer's. ``buffer`` is zeroed memory of ``sizes.bytes``.

    A record's life: ``add`` makes it findable, ``hide`` takes that back, ``vacate`` frees its entry.
    """

    def __init__(self, buffer: Buffer, sizes: Sizes) -> None:
        HEAD.pack_into(buffer, 0, MAGIC, *sizes)
        super().__init__(buffer)
        self._space = Space(sizes.rows, ROW_UNIT)
        self._fresh = 0
        self._vacant: list[int] = []
        self.records = 0
        """Findable ones."""

    @property
    def full(self) -> bool:
        """Whether no entry is left."""
        return not self._vacant and self._fresh >= self._sizes.entries

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
        words, at = self._words, 3 * slot
        words[at], words[at + 1], words[at + 2] = generation - 1, row, blocks
        words[at] = generation
        self._insert(places[:KEY_BYTES], slot, 0)
        self._insert(places[-KEY_BYTES:], slot, LAST)
        self.records += 1
        return Found(slot, blocks, generation)

    def hide(self, slot: int) -> None:
        """Nobody finds it from now on; its generation is over, its entry stays taken."""
        generation, row, blocks = self._entry(slot)
        assert not generation & 1, "hidden twice"
        words, at = self._words, 3 * slot
        words[at] = generation + 1
        self._delete(self._place(slot, 0), slot, 0)
        self._delete(self._place(slot, LAST), slot, LAST)
        size = blocks * (KEY_BYTES + PROOF_BYTES)
        self._space.free([(row - self._sizes.rows_at, size)])
        words[at + 1] = words[at + 2] = 0
        self.records -= 1

    def vacate(self, slot: int) -> None:
        """The entry of a hidden record may be used again."""
        self._vacant.append(slot)

    def begins(self, place: bytes) -> bool:
        """Whether a record's first block is this."""
        return self._find(place, 0) is not None

    def ending(self, place: bytes) -> int:
        """The record whose last block this is, or -1."""
        found = self._find(place, LAST)
        return -1 if found is None else found[0]

    def generation(self, slot: int) -> int:
        return self._entry(slot)[0]

    def places(self, slot: int) -> bytes:
        """All places of a findable record."""
        _, row, blocks = self._entry(slot)
        return bytes(self._buffer[row : row + KEY_BYTES * blocks])

    def _place(self, slot: int, kind: int) -> bytes:
        _, row, blocks = self._entry(slot)
        if kind and blocks:
            row += KEY_BYTES * (blocks - 1)
        return bytes(self._buffer[row : row + KEY_BYTES])

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
            mine = self._place((word & INDEX) - 1, word & LAST)
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
        assert sorted((word & INDEX) - 1 for word in words) == sorted(live * 2)
        rows = sum(self._space.rounded(self._entry(slot)[2] * (KEY_BYTES + PROOF_BYTES)) for slot in live)
        assert rows + self._space.free_bytes == self._space.total_bytes
        for slot in live:
            places = self.places(slot)
            assert self.begins(places[:KEY_BYTES])
            assert self.ending(places[-KEY_BYTES:]) >= 0
        assert len(set(self._vacant)) == len(self._vacant)
        assert not set(self._vacant) & set(live)
