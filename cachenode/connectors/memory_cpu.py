"""KV blocks in the machine's main memory: numpy copies, one for each run of neighbouring blocks.

numpy copies in the calling thread and lets the interpreter go meanwhile; torch would start threads of
its own beside the engine's.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_POPULATE_WRITE = 23
"""Of madvise, since Linux 5.14."""


def touch(memory: Bytes) -> bool:
    """Takes every page of this memory now, contents kept; False where the kernel cannot, or has too few."""
    start = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.ctypes.data + memory.nbytes - start
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return bool(madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE) == 0)


class CpuMemory:
    """``regions``: views (parts, blocks, bytes) of the engine's KV; a block is its bytes of all parts of
    all regions, one after the other."""

    def __init__(self, regions: Sequence[Bytes]) -> None:
        self._regions = list(regions)
        self.block_bytes = sum(region.shape[0] * region.shape[2] for region in regions)

    def save(self, ids: Sequence[int], into: Bytes) -> None:
        for mine, theirs in self._runs(ids, into):
            theirs[...] = mine

    def load(self, ids: Sequence[int], data: Bytes) -> None:
        for mine, theirs in self._runs(ids, data):
            mine[...] = theirs

    def fence(self) -> None:
        """The engine computes in its own thread: what it has begun is over."""

    def finish(self) -> None:
        """Nothing is under way here."""

    def _runs(self, ids: Sequence[int], data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """The engine's bytes and the record's of each run, as equal shapes (blocks, parts, bytes)."""
        table = data.reshape(len(ids), self.block_bytes)
        for first, count in runs(ids):
            column = 0
            for region in self._regions:
                parts, _, size = region.shape
                mine = region[:, ids[first] : ids[first] + count].transpose(1, 0, 2)
                theirs = table[first : first + count, column : column + parts * size]
                yield mine, theirs.reshape(count, parts, size)
                column += parts * size


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(index, count) of each run of ids that count up by one."""
    first = 0
    for index in range(1, len(ids) + 1):
        if index == len(ids) or ids[index] != ids[index - 1] + 1:
            yield first, index - first
            first = index
