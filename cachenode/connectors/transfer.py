"""Copies between the engine's blocks and a record's bytes: few large ones, straight from and to the arena
where whole blocks lie in it, over a buffer where a passage cuts one, or over the socket in copy mode.

One thread at a time per Transfer. Knows neither torch nor the node's protocol, only its pieces.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachenode.connectors.passages import Cut, find, rank_start
from cachenode.wire import MAX_COPY, Grant, Piece

Bytes = npt.NDArray[np.uint8]

STEP_BYTES = 16 * 1024 * 1024
"""Most bytes of one copy, so that a load never waits long behind a store."""


class Memory(Protocol):
    """The engine's KV blocks of one rank. A block's bytes are those of all layers, one after the other.
    Copies may go on after ``save`` and ``load``; they are over after ``finish``."""

    @property
    def block_bytes(self) -> int: ...
    def save(self, ids: Sequence[int], into: Bytes) -> None: ...
    def load(self, ids: Sequence[int], data: Bytes) -> None: ...
    def finish(self) -> None: ...


class Place(Protocol):
    """A worker's side of a session: the mapped arena, or in copy mode (``arena`` is None) the socket."""

    @property
    def arena(self) -> Bytes | None: ...
    def valid(self, slot: int, generation: int) -> bool: ...
    def read(self, lease: int, piece: int, rank: int, offset: int, length: int) -> bytes | None: ...
    def write(self, reservation: int, rank: int, offset: int, data: bytes) -> bool: ...


class Transfer:
    """Copies for one rank. Methods return False where the bytes cannot be had or written."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank = memory, rank
        self._step = max(1, STEP_BYTES // memory.block_bytes)
        self._buffer = np.empty(memory.block_bytes, np.uint8)

    def save(self, place: Place, grant: Grant, ids: Sequence[int]) -> bool:
        """Write the engine's blocks ``ids`` as the grant's record."""
        if len(ids) != grant.blocks:
            return False
        if place.arena is None:
            return self._send(place, grant, ids)
        size = self._memory.block_bytes
        start = rank_start(self._rank, grant.blocks, size)
        for span in find(grant.passages, start, grant.blocks, size):
            if isinstance(span, Cut):
                self._memory.save(ids[span.block : span.block + 1], self._buffer)
                self._memory.finish()
                self._scatter(place.arena, span)
                continue
            for at in range(0, span.blocks, self._step):
                some = ids[span.block + at : span.block + min(at + self._step, span.blocks)]
                offset = span.offset + at * size
                self._memory.save(some, place.arena[offset : offset + len(some) * size])
        self._memory.finish()
        return True

    def load(self, place: Place, lease: int, number: int, piece: Piece, ids: Sequence[int]) -> bool:
        """Read piece ``number`` of a lease into the engine's blocks ``ids``; False also where the record is
        another one by now: then what was read is not to be trusted."""
        if len(ids) != piece.blocks:
            return False
        if place.arena is None:
            return self._receive(place, lease, number, piece, ids)
        size = self._memory.block_bytes
        start = rank_start(self._rank, piece.of, size) + piece.start * size
        for span in find(piece.passages, start, piece.blocks, size):
            if isinstance(span, Cut):
                self._gather(place.arena, span)
                self._memory.load(ids[span.block : span.block + 1], self._buffer)
                self._memory.finish()
                continue
            for at in range(0, span.blocks, self._step):
                some = ids[span.block + at : span.block + min(at + self._step, span.blocks)]
                offset = span.offset + at * size
                self._memory.load(some, place.arena[offset : offset + len(some) * size])
        self._memory.finish()
        return place.valid(piece.slot, piece.generation)

    def _scatter(self, arena: Bytes, cut: Cut) -> None:
        at = 0
        for offset, length in cut.parts:
            arena[offset : offset + length] = self._buffer[at : at + length]
            at += length

    def _gather(self, arena: Bytes, cut: Cut) -> None:
        at = 0
        for offset, length in cut.parts:
            self._buffer[at : at + length] = arena[offset : offset + length]
            at += length

    def _send(self, place: Place, grant: Grant, ids: Sequence[int]) -> bool:
        size = self._memory.block_bytes
        for number in range(grant.blocks):
            self._memory.save(ids[number : number + 1], self._buffer)
            self._memory.finish()
            for at in range(0, size, MAX_COPY):
                data = self._buffer[at : at + MAX_COPY].tobytes()
                if not place.write(grant.reservation, self._rank, number * size + at, data):
                    return False
        return True

    def _receive(self, place: Place, lease: int, number: int, piece: Piece, ids: Sequence[int]) -> bool:
        size = self._memory.block_bytes
        for block in range(piece.blocks):
            for at in range(0, size, MAX_COPY):
                length = min(MAX_COPY, size - at)
                data = place.read(lease, number, self._rank, block * size + at, length)
                if data is None or len(data) != length:
                    return False
                self._buffer[at : at + length] = np.frombuffer(data, np.uint8)
            self._memory.load(ids[block : block + 1], self._buffer)
            self._memory.finish()
        return True
