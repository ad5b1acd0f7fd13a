"""Copies in the background: each job ends once, whatever happens to it."""

from collections.abc import Iterator, Set

import numpy as np
import pytest

from cachenode.connectors.jobs import Jobs, Results
from cachenode.connectors.memory_cpu import CpuMemory
from cachenode.connectors.places import Places
from cachenode.connectors.transfer import Bytes, Transfer
from cachenode.connectors.work import Load, Store
from cachenode.wire import Grant, Piece
from hotprefix.processes import wait_until

SIZE = 64


class FakePlace:
    def __init__(self) -> None:
        self.arena: Bytes | None = np.zeros(100 * SIZE, np.uint8)
        self.closed = False

    def valid(self, slot: int, generation: int) -> bool:
        return generation == 2

    def read(self, lease: int, piece: int, rank: int, offset: int, length: int) -> bytes | None:
        raise AssertionError

    def write(self, reservation: int, rank: int, offset: int, data: bytes) -> bool:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class Bench:
    def __init__(self) -> None:
        self.place = FakePlace()
        self.kv = np.arange(20 * SIZE, dtype=np.uint8).reshape(1, 20, SIZE)
        memory = CpuMemory([self.kv])
        self.places = Places(lambda session: self.place if session == "s" else None)
        self.jobs = Jobs(Transfer(memory, 0), Transfer(memory, 0), self.places)

    def all(self, loads: int, stores: int) -> Results:
        """Results until so many ended."""
        found = Results()

        def look() -> bool:
            some = self.jobs.take(0.1)
            found.loaded |= some.loaded
            found.bad |= some.bad
            found.report = found.report.merge(some.report)
            return len(found.loaded) == loads and len(found.report.ended) == stores

        assert wait_until(look, 5.0)
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.jobs.close()


def store(job: int, session: str = "s", offset: int = 0) -> Store:
    return Store(job, session, 4, [3, 4], [Grant(1, 4, 2, [(offset, 2 * SIZE)])])


def test_a_store_and_a_load(bench: Bench) -> None:
    bench.jobs.put([], [store(1)])
    assert bench.all(0, 1).report.failed == set()
    piece = Piece(0, 2, 4, 2, 0, 2, [(0, 2 * SIZE)])
    bench.jobs.put([Load("r", "s", 1, 4, [7, 8, 9], [piece])], [])
    found = bench.all(1, 0)
    assert found.loaded == {"r"}
    assert found.bad == {9}, "what no piece covers is bad"
    assert (bench.kv[0, 7:9] == bench.kv[0, 3:5]).all()


def test_a_stale_piece_is_bad_and_an_aborted_load_is_only_ended(bench: Bench) -> None:
    stale = Piece(0, 4, 0, 1, 0, 1, [(0, SIZE)])
    bench.jobs.put([Load("r", "s", 1, 0, [7], [stale]), Load("a", "s", 2, 0, [], [])], [])
    found = bench.all(2, 0)
    assert found.loaded == {"r", "a"}
    assert found.bad == {7}


def test_a_lost_session_and_an_impossible_place_fail(bench: Bench) -> None:
    piece = Piece(0, 2, 0, 1, 0, 1, [(10_000_000, SIZE)])
    bench.jobs.put(
        [Load("gone", "t", 1, 0, [1], [piece]), Load("far", "s", 1, 0, [2], [piece])],
        [store(1, "t"), store(2, "s", 10_000_000), store(3)],
    )
    found = bench.all(2, 3)
    assert found.bad == {1, 2}
    assert found.report.failed == {1, 2}
    assert bench.jobs.errors == 2


def test_places_are_left_when_no_copy_needs_them() -> None:
    place = FakePlace()
    places = Places(lambda session: place)
    needed: Set[str] = {"s"}
    places.follow("s", lambda: needed)
    assert wait_until(lambda: places.get("s") is place, 5.0)
    places.follow("", lambda: needed)
    assert not place.closed
    needed = set()
    places.follow("", lambda: needed)
    assert place.closed
