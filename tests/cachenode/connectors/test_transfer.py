"""What is saved comes back: over whole and cut passages, ranks, parts of records, and the socket."""

import random

import numpy as np
import pytest

from cachenode.connectors.memory_cpu import CpuMemory, runs
from cachenode.connectors.transfer import Bytes, Transfer
from cachenode.wire import Grant, Piece

PARTS = ((3, 40), (2, 7))
SIZE = sum(parts * size for parts, size in PARTS)
BLOCKS = 24
RANKS = 2


class FakePlace:
    """An arena, or with ``copy`` a node's reservations; a record's generation can be changed."""

    def __init__(self, copy: bool = False) -> None:
        self.arena: Bytes | None = None if copy else np.zeros(100_000, np.uint8)
        self.generations = {5: 2}
        self.records: dict[int, dict[int, bytearray]] = {}
        self.cut = False

    def valid(self, slot: int, generation: int) -> bool:
        return self.generations.get(slot) == generation

    def write(self, reservation: int, rank: int, offset: int, data: bytes) -> bool:
        if self.cut:
            return False
        part = self.records.setdefault(reservation, {}).setdefault(rank, bytearray(SIZE * BLOCKS))
        part[offset : offset + len(data)] = data
        return True

    def read(self, lease: int, piece: int, rank: int, offset: int, length: int) -> bytes | None:
        return None if self.cut else bytes(self.records[lease][rank][offset : offset + length])


def engine(seed: int) -> tuple[list[Bytes], Transfer, Transfer]:
    """KV in two regions, and a transfer of each rank."""
    random_bytes = np.random.default_rng(seed)
    regions = [random_bytes.integers(0, 256, (parts, BLOCKS, size), np.uint8) for parts, size in PARTS]
    memory = CpuMemory(regions)
    assert memory.block_bytes == SIZE
    return regions, Transfer(memory, 0), Transfer(memory, 1)


def equal(one: list[Bytes], ids: list[int], other: list[Bytes], moved: list[int]) -> bool:
    return all(bool((a[:, ids] == b[:, moved]).all()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("lengths", [[SIZE * 10], [SIZE * 3, SIZE * 7], [50, 1000, 3, 4000], [17] * 200])
def test_a_record_comes_back_on_another_engine(lengths: list[int]) -> None:
    place, dice = FakePlace(), random.Random(1)
    ids, moved = dice.sample(range(BLOCKS), 5), dice.sample(range(BLOCKS), 3)
    passages, at = [], 9_000
    for length in lengths:
        passages.append((at, length))
        at += length + 13
    source, *saving = engine(1)
    target, *loading = engine(2)
    before = [region.copy() for region in target]
    for save in saving:
        assert save.save(place, Grant(1, 8, 5, passages), ids)
    piece = Piece(5, 2, 10, 3, 2, 5, passages)
    assert loading[1].load(place, 1, 0, piece, moved)
    assert equal(source, ids[2:], target, moved)
    rest = [block for block in range(BLOCKS) if block not in moved]
    assert equal(before, rest, target, rest)
    assert place.arena is not None
    used = {i for offset, length in passages for i in range(offset, offset + length)}
    outside = np.array([i for i in range(place.arena.size) if i not in used])
    assert not place.arena[outside].any(), "no byte outside the passages"


def test_another_generation_is_no_load() -> None:
    place, (_, transfer, _) = FakePlace(), engine(1)
    piece = Piece(5, 2, 0, 1, 0, 1, [(0, SIZE * RANKS)])
    assert transfer.load(place, 1, 0, piece, [4])
    place.generations[5] = 4
    assert not transfer.load(place, 1, 0, piece, [4])


def test_counts_that_do_not_agree_are_refused() -> None:
    place, (_, transfer, _) = FakePlace(), engine(1)
    assert not transfer.save(place, Grant(1, 0, 2, [(0, 1000)]), [1])
    assert not transfer.load(place, 1, 0, Piece(5, 2, 0, 2, 0, 2, [(0, 1000)]), [1])


def test_copy_mode_goes_over_the_socket() -> None:
    place = FakePlace(copy=True)
    source, save, _ = engine(1)
    target, load, _ = engine(2)
    assert save.save(place, Grant(7, 0, 3, []), [4, 9, 1])
    assert load.load(place, 7, 0, Piece(5, 2, 0, 3, 0, 3, []), [0, 2, 3])
    assert equal(source, [4, 9, 1], target, [0, 2, 3])
    place.cut = True
    assert not save.save(place, Grant(7, 0, 1, []), [4])
    assert not load.load(place, 7, 0, Piece(5, 2, 0, 1, 0, 1, []), [4])


def test_runs_of_ids() -> None:
    assert list(runs([3, 4, 5, 9, 8, 9])) == [(0, 3), (3, 1), (4, 2)]
    assert not list(runs([]))
