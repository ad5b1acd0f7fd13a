"""A node in the same process, for what the transformers connector does with what a node says: it keeps each
block by its place and proof, and scatters every record over passages that cut blocks anywhere."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cachenode.record import Layout, moved, realm
from cachenode.wire import Done, Grant, Leased, Piece, Reply, Reserved

KEY, PROOF = 16, 32
LARGEST_PASSAGE = 3_001


class FakeNode:
    """Stands for a client and for an attachment. ``fits`` bounds the blocks it takes, ``torn`` are slots whose
    record changes while it is read, ``mute`` is a node that answers nothing any more, ``copies`` one whose memory
    cannot be mapped."""

    def __init__(self, layout: Layout, size: int, seed: int = 0) -> None:
        self.layout, self.random = layout, random.Random(seed)
        self.memory = np.full(size, 0xA5, dtype=np.uint8)
        self.copies = False
        self.fits, self.mute, self.short = 1 << 30, False, False
        self.torn: set[int] = set()
        self.blocks: dict[tuple[bytes, bytes], tuple[int, Grant, int]] = {}
        self.leases: dict[int, Leased] = {}
        self.reserved: dict[int, tuple[Grant, list[tuple[bytes, bytes]]]] = {}
        self.aborted: list[int] = []
        self.session, self.quieted, self.joined = "a session", list[str](), list[str]()
        self.reconnects, self.closed = False, 0
        self._replies: dict[int, Reply] = {}
        self._number = 0
        self._free = self._scatter()

    def _scatter(self) -> list[tuple[int, int]]:
        """All of the arena as odd runs in any order, with gaps between them."""
        runs, at = [], 1
        while at < len(self.memory) - LARGEST_PASSAGE:
            length = self.random.randint(1, LARGEST_PASSAGE)
            runs.append((at, length))
            at += length + self.random.randint(0, 3)
        self.random.shuffle(runs)
        return runs

    def _take(self, size: int) -> list[tuple[int, int]]:
        passages: list[tuple[int, int]] = []
        while size:
            offset, length = self._free.pop()
            passages.append((offset, min(length, size)))
            size -= passages[-1][1]
        return passages

    def _names(self, adapter: str, keys: bytes, proofs: bytes) -> list[tuple[bytes, bytes]]:
        places = moved(keys, realm(self.layout.fingerprint(), adapter))
        count = len(keys) // KEY
        return [
            (places[i * KEY : i * KEY + KEY], proofs[i * PROOF : i * PROOF + PROOF]) for i in range(count)
        ]

    def _say(self, reply: Reply) -> int:
        self._number += 1
        self._replies[self._number] = reply
        return self._number

    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int:
        names = self._names(adapter, keys, proofs)
        return next((i for i, name in enumerate(names) if name not in self.blocks), len(names))

    def reserve(
        self,
        first: int,
        keys: bytes,
        proofs: bytes,
        adapter: str = "",
        parent: bytes = b"",
        *,
        skip: int = 0,
    ) -> int | None:
        names, grants = self._names(adapter, keys, proofs)[: self.fits], []
        held = next((i for i, name in enumerate(names) if name not in self.blocks), len(names))
        for begin, end in _chunks(held, len(names), self.layout.chunk_blocks):
            passages = self._take(self.layout.record_bytes(end - begin) - (1 if self.short else 0))
            self._number += 1
            grant = Grant(self._number, begin, end - begin, passages)
            grants.append(grant)
            self.reserved[grant.reservation] = (grant, names[begin:end])
        return self._say(Reserved(0, "boot", grants, len(names)))

    def commit(self, ids: Sequence[int]) -> int | None:
        for reservation in ids:
            grant, names = self.reserved.pop(reservation)
            self._number += 1
            self.blocks |= {name: (self._number, grant, start) for start, name in enumerate(names)}
        return self._say(Done(0, "boot", len(ids)))

    def abort(self, ids: Sequence[int]) -> int | None:
        self.aborted += ids
        for reservation in ids:
            del self.reserved[reservation]
        return self._say(Done(0, "boot", len(ids)))

    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None:
        found = self.match(adapter, keys, proofs)
        pieces: list[Piece] = []
        for number, name in enumerate(self._names(adapter, keys, proofs)[:found]):
            slot, grant, start = self.blocks[name]
            if pieces and pieces[-1].slot == slot:
                last = pieces.pop()
                pieces.append(Piece(slot, 2, last.first, last.blocks + 1, last.start, last.of, last.passages))
            else:
                pieces.append(Piece(slot, 2, number, 1, start, grant.blocks, grant.passages))
        if not found:
            return self._say(Leased(0, "boot", 0, 0, []))
        self._number += 1
        self.leases[self._number] = Leased(0, "boot", self._number, found, pieces)
        return self._say(self.leases[self._number])

    def release(self, ids: Sequence[int]) -> int | None:
        for lease in ids:
            del self.leases[lease]
        return self._say(Done(0, "boot", len(ids)))

    def wait(self, ticket: int, seconds: float) -> Reply | None:
        if self.reconnects:
            self.session += "!"
        return None if self.mute else self._replies.pop(ticket)

    def poll(self) -> list[Reply]:
        """What nobody waited for, or waited for long enough."""
        replies, self._replies = list(self._replies.values()), {}
        return replies

    def join(self, session: str) -> "FakeNode | None":
        self.joined.append(session)
        return self if session == self.session else None

    def quiet(self, session: str) -> None:
        self.quieted.append(session)

    def forget(self) -> None:
        self.blocks.clear()

    def close(self) -> None:
        self.closed += 1

    @property
    def arena(self) -> npt.NDArray[np.uint8] | None:
        return None if self.copies else self.memory

    def read(self, lease: int, piece: int, rank: int, offset: int, length: int) -> bytes | None:
        found = self.leases[lease].pieces[piece]
        if found.slot in self.torn:
            return None
        where = self._bytes(found.passages)[found.start * self.layout.block_bytes + offset :][:length]
        return self.memory[where].tobytes()

    def write(self, reservation: int, rank: int, offset: int, data: bytes) -> bool:
        where = self._bytes(self.reserved[reservation][0].passages)[offset : offset + len(data)]
        if len(where) == len(data):
            self.memory[where] = np.frombuffer(data, np.uint8)
        return len(where) == len(data)

    def _bytes(self, passages: list[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """Where each byte of a record lies."""
        return np.concatenate([np.arange(offset, offset + length) for offset, length in passages])

    def valid(self, slot: int, generation: int) -> bool:
        return slot not in self.torn


def _chunks(first: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """The blocks from ``first`` up to ``end``, cut where a chunk ends."""
    while first < end:
        stop = min(end, (first // chunk + 1) * chunk)
        yield first, stop
        first = stop
