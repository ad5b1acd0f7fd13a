"""Where blocks of a record lie in the arena: runs of whole blocks, and blocks that a passage's end cuts.
Pure arithmetic."""

from collections.abc import Iterator, Sequence

import msgspec


class Whole(msgspec.Struct, frozen=True):
    """``blocks`` blocks from block ``block`` on lie one after the other at ``offset`` of the arena."""

    offset: int
    block: int
    blocks: int


class Cut(msgspec.Struct, frozen=True):
    """Block ``block`` lies in these (offset, length) parts of the arena."""

    block: int
    parts: list[tuple[int, int]]


def rank_start(rank: int, blocks: int, block_bytes: int) -> int:
    """Where the bytes of a rank begin in a record of so many blocks."""
    return rank * blocks * block_bytes


def find(passages: Sequence[tuple[int, int]], start: int, blocks: int, block_bytes: int) -> list[Whole | Cut]:
    """The ``blocks`` blocks whose bytes begin at byte ``start`` of the passages. Blocks count from 0.
    Raises ValueError where the passages are too short or a passage is no passage."""
    found: list[Whole | Cut] = []
    block, missing = 0, 0
    parts: list[tuple[int, int]] = []
    for at, end in _behind(passages, start):
        if parts:
            taken = min(missing, end - at)
            parts.append((at, taken))
            at, missing = at + taken, missing - taken  # noqa: PLW2901 - the rest of the passage
            if missing:
                continue
            found.append(Cut(block, parts))
            block, parts = block + 1, []
        if whole := min((end - at) // block_bytes, blocks - block):
            found.append(Whole(at, block, whole))
            at, block = at + whole * block_bytes, block + whole  # noqa: PLW2901
        if block == blocks:
            return found
        if at < end:
            parts, missing = [(at, end - at)], block_bytes - (end - at)
    if block < blocks:
        raise ValueError(f"the passages end in block {block} of {blocks}")
    return found


def _behind(passages: Sequence[tuple[int, int]], start: int) -> Iterator[tuple[int, int]]:
    """(begin, end) in the arena of what lies behind the first ``start`` bytes."""
    for offset, length in passages:
        if offset < 0 or length < 0:
            raise ValueError(f"a passage of {length} bytes at {offset}")
        skipped = min(start, length)
        start -= skipped
        if skipped < length:
            yield offset + skipped, offset + length
