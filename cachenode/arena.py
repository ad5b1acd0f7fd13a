"""Who has which bytes of the arena: free space, given out in scattered passages.

A record may lie in several passages, so space is refused only when there is too little of it, never because
it lies in pieces. Nothing here touches the bytes themselves.
"""

from collections.abc import Sequence

from sortedcontainers import SortedDict, SortedList

UNIT = 4096
Passage = tuple[int, int]


class Space:
    """``total_bytes`` (rounded down to whole units) to give out. Offsets and lengths are bytes; what is
    given out begins at a unit and occupies whole units, whatever length was asked for."""

    def __init__(self, total_bytes: int, unit: int = UNIT) -> None:
        self.unit = unit
        self.total_bytes = total_bytes - total_bytes % unit
        self.free_bytes = 0
        self._by_offset: SortedDict[int, int] = SortedDict()
        self._by_size: SortedList[tuple[int, int]] = SortedList()
        if self.total_bytes:
            self._put(0, self.total_bytes)

    def rounded(self, size: int) -> int:
        """The bytes that ``size`` bytes occupy."""
        return -(-size // self.unit) * self.unit

    def allocate(self, size: int) -> list[Passage] | None:
        """Passages of together ``size`` bytes, as few as can be; None where less is free."""
        left = self.rounded(size)
        if not 0 < left <= self.free_bytes:
            return None
        passages: list[Passage] = []
        while left:
            at = self._by_size.bisect_left((left, 0))
            length, offset = self._by_size[at if at < len(self._by_size) else -1]
            taken = min(left, length)
            self._take(offset, length, taken)
            left -= taken
            passages.append((offset, taken))
        offset, length = passages[-1]
        passages[-1] = (offset, length - (self.rounded(size) - size))
        return passages

    def run(self, size: int) -> int | None:
        """The offset of ``size`` bytes in one piece; None where no free piece is so long."""
        wanted = self.rounded(size)
        at = self._by_size.bisect_left((wanted, 0))
        if wanted <= 0 or at == len(self._by_size):
            return None
        length, offset = self._by_size[at]
        self._take(offset, length, wanted)
        return int(offset)

    def free(self, passages: Sequence[Passage]) -> None:
        """Gives back what ``allocate`` or ``run`` gave, whole."""
        for offset, length in passages:
            self._give(offset, self.rounded(length))

    def _give(self, offset: int, length: int) -> None:
        at = self._by_offset.bisect_left(offset)
        if at < len(self._by_offset):
            after, size = self._by_offset.peekitem(at)
            assert offset + length <= after, "freed twice"
            if offset + length == after:
                self._drop(after, size)
                length += size
        if at > 0:
            before, size = self._by_offset.peekitem(at - 1)
            assert before + size <= offset, "freed twice"
            if before + size == offset:
                self._drop(before, size)
                offset, length = before, length + size
        self._put(offset, length)

    def _take(self, offset: int, length: int, taken: int) -> None:
        self._drop(offset, length)
        if length > taken:
            self._put(offset + taken, length - taken)

    def _put(self, offset: int, length: int) -> None:
        self._by_offset[offset] = length
        self._by_size.add((length, offset))
        self.free_bytes += length

    def _drop(self, offset: int, length: int) -> None:
        del self._by_offset[offset]
        self._by_size.remove((length, offset))
        self.free_bytes -= length

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        assert sorted((offset, length) for length, offset in self._by_size) == list(self._by_offset.items())
        assert self.free_bytes == sum(self._by_offset.values()) <= self.total_bytes
        end = -1
        for offset, length in self._by_offset.items():
            assert offset > end, "neighbours must be one"
            assert length > 0
            assert not offset % self.unit
            assert not length % self.unit
            end = offset + length
        assert end <= self.total_bytes
