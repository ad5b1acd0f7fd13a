"""Free space: to the byte, and never lost in pieces."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachenode.arena import Passage, Space


def test_the_budget_is_honoured_to_the_byte() -> None:
    space = Space(10 * 4096 + 17)
    assert space.total_bytes == 10 * 4096
    first = space.allocate(4096 * 4)
    second = space.allocate(4096 * 6)
    assert first
    assert second
    assert space.free_bytes == 0
    assert space.allocate(1) is None
    space.free(second)
    assert space.free_bytes == 6 * 4096
    assert space.allocate(0) is None


@pytest.mark.parametrize("seed", range(3))
def test_no_fragmentation_cliff(seed: int) -> None:
    """Fill with small records, free every second one, refill with larger ones of odd sizes: all free space
    can be had."""
    space, rng = Space(4096 * 1000), random.Random(seed)
    small = [space.allocate(4096) for _ in range(1000)]
    assert space.free_bytes == 0
    for passages in small[::2]:
        assert passages is not None
        space.free(passages)
    taken = 0
    while space.free_bytes:
        size = min(space.free_bytes, rng.randrange(1, 4096 * 50))
        passages = space.allocate(size)
        assert passages is not None
        assert sum(length for _, length in passages) == size
        taken += space.rounded(size)
        space.check_integrity()
    assert taken == 500 * 4096


def test_a_run_lies_in_one_piece() -> None:
    space = Space(4096 * 10)
    runs = [space.run(4096 * 2) for _ in range(5)]
    assert None not in runs
    for at in (runs[0], runs[2]):
        assert at is not None
        space.free([(at, 4096 * 2)])
    assert space.run(4096 * 3) is None
    scattered = space.allocate(4096 * 3)
    assert scattered is not None
    assert len(scattered) == 2


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 30_000)), max_size=80))
def test_against_a_model(steps: list[tuple[bool, int]]) -> None:
    space, held = Space(4096 * 64), list[tuple[int, list[Passage]]]()
    for take, size in steps:
        if take:
            passages = space.allocate(size)
            assert (passages is None) == (
                space.rounded(size) > 4096 * 64 - sum(space.rounded(s) for s, _ in held)
            )
            if passages is not None:
                assert sum(length for _, length in passages) == size
                held.append((size, passages))
        elif held:
            space.free(held.pop(size % len(held))[1])
        space.check_integrity()
        spans = sorted(passage for _, passages in held for passage in passages)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
