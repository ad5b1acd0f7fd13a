"""What the store knows of each record beyond the directory: where its bytes lie and who needs them.

One column an attribute, a few bytes each, since there are many records. A record's number is its slot in
the directory.
"""

from array import array

import msgspec

from cachenode.arena import Passage, Space


class Held(msgspec.Struct):
    """Bytes of committed records by what keeps them, in whole units of the arena."""

    used: int = 0
    leased: int = 0
    quarantined: int = 0


class Records:
    """``held`` sums up all records: a leased one has readers, a quarantined one only readers that were lost,
    the others count as used."""

    def __init__(self, space: Space) -> None:
        self.held = Held()
        self._space = space
        self._offset = array("q")
        self._bytes = array("q")
        self._scattered: dict[int, list[Passage]] = {}
        self.serial = array("q")
        """When it was committed, counted in commits; 0 for an empty slot."""
        self.realm = array("i")
        """Number of its realm."""
        self._readers = array("i")
        self._lost = array("i")
        self._pins = array("i")
        self._expected = array("i")

    def put(self, slot: int, passages: list[Passage], size: int, realm: int, serial: int) -> None:
        """A new record in an empty slot."""
        while slot >= len(self.serial):
            for column in (self._offset, self._bytes, self.serial):
                column.append(0)
            for column in (self.realm, self._readers, self._lost, self._pins, self._expected):
                column.append(0)
        self._offset[slot], self._bytes[slot] = passages[0][0], size
        if len(passages) > 1:
            self._scattered[slot] = passages
        self.realm[slot], self.serial[slot] = realm, serial
        self.held.used += self._space.rounded(size)

    def take(self, slot: int) -> list[Passage]:
        """Empties a slot that nobody needs; its passages are the caller's."""
        assert not self.needed(slot)
        passages = self.passages(slot)
        self._scattered.pop(slot, None)
        self.held.used -= self._space.rounded(self._bytes[slot])
        self._bytes[slot] = self.serial[slot] = 0
        return passages

    def passages(self, slot: int) -> list[Passage]:
        return self._scattered.get(slot) or [(self._offset[slot], self._bytes[slot])]

    def needed(self, slot: int) -> bool:
        """Whether it must stay: read, pinned, to have a child soon, or perhaps still being read by a lost
        session."""
        return bool(self._readers[slot] or self._lost[slot] or self._pins[slot] or self._expected[slot])

    def readers(self, slot: int, more: int) -> None:
        """So many leases more (or fewer) read it."""
        self._count(slot, self._readers, more)

    def lost(self, slot: int, more: int) -> None:
        """So many lost leases more (or fewer) may read it."""
        self._count(slot, self._lost, more)

    def expect(self, slot: int, more: int) -> None:
        """So many reservations more (or fewer) continue its prompt."""
        self._expected[slot] += more
        assert self._expected[slot] >= 0, "one child too many"

    def pin(self, slot: int, more: int) -> bool:
        """One pin more or fewer; False where there is none to take."""
        if self._pins[slot] + more < 0:
            return False
        self._pins[slot] += more
        return True

    def unpin_all(self, slot: int) -> None:
        self._pins[slot] = 0

    @property
    def pinned(self) -> int:
        return sum(1 for pins in self._pins if pins)

    def _count(self, slot: int, column: "array[int]", more: int) -> None:
        size = self._space.rounded(self._bytes[slot])
        self._add(slot, -size)
        column[slot] += more
        assert column[slot] >= 0, "released twice"
        self._add(slot, size)

    def _add(self, slot: int, size: int) -> None:
        if self._readers[slot]:
            self.held.leased += size
        elif self._lost[slot]:
            self.held.quarantined += size
        else:
            self.held.used += size

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        mine, sums = self.held, Held()
        self.held = sums
        for slot in self.slots():
            self._add(slot, self._space.rounded(self._bytes[slot]))
            assert sum(length for _, length in self.passages(slot)) == self._bytes[slot]
        self.held = mine
        assert sums == mine, f"{mine} counted, {sums} held"

    def slots(self) -> list[int]:
        """All that are not empty."""
        return [slot for slot, serial in enumerate(self.serial) if serial]
