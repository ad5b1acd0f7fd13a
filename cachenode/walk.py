"""What a request names: a stretch of one prompt, walked block by block; and bytes of one rank in it."""

from typing import NamedTuple

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Passage
from cachenode.record import PROOF_BYTES, Layout
from cachenode.wire import Reserve


class Walk:
    """Where the handling of a ``Reserve`` stands: at block number ``at`` of ``total``. ``why`` is "" until it
    must end early. ``protected``: records that must not go to make room for it, ``parent`` the record passed
    last, if no block has followed it yet: entry and generation, else (-1, 0)."""

    def __init__(self, ask: Reserve, places: bytes, before: bytes) -> None:
        self.ask, self.places, self.before = ask, places, before
        self.total = len(places) // KEY_BYTES
        self.at = 0
        self.why = ""
        self.protected: set[int] = set()
        self.parent = (-1, 0)

    def place(self, at: int) -> bytes:
        return self.places[KEY_BYTES * at : KEY_BYTES * (at + 1)]

    def proof(self, at: int) -> bytes:
        return self.ask.proofs[PROOF_BYTES * at : PROOF_BYTES * (at + 1)]

    def cut(self, blocks: int) -> tuple[bytes, bytes]:
        """Places and proofs of the next blocks."""
        at, end = self.at, self.at + blocks
        return self.places[KEY_BYTES * at : KEY_BYTES * end], self.ask.proofs[
            PROOF_BYTES * at : PROOF_BYTES * end
        ]

    def passed(self, slot: int, generation: int, blocks: int) -> None:
        """These blocks are held, by this record."""
        self.protected.add(slot)
        self.parent = (slot, generation)
        self.at += blocks

    def skip(self, blocks: int) -> None:
        """These blocks are somebody's, or nobody's that matters."""
        self.parent = (-1, 0)
        self.at += blocks

    @property
    def last(self) -> bytes:
        """The place of the block before the next one; b"" at a prompt's start."""
        return self.place(self.at - 1) if self.at else self.before


class Part(NamedTuple):
    """So many bytes of a rank's part of a record, from ``offset`` of that part on."""

    rank: int
    offset: int
    length: int


def spans(layout: Layout, passages: list[Passage], blocks: int, part: Part) -> list[Passage]:
    """Where these bytes of a record of so many blocks lie in the arena; [] for what is not inside it."""
    size = blocks * layout.block_bytes
    rank, offset, length = part
    if not (0 <= rank < layout.ranks and offset >= 0 and length > 0 and offset + length <= size):
        return []
    start = rank * size + offset
    end, at, found = start + length, 0, list[Passage]()
    for where, size in passages:
        low, high = max(start, at), min(end, at + size)
        if low < high:
            found.append((where + low - at, high - low))
        at += size
    return found
