"""Blocks are found wherever passages put them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachenode.connectors.passages import Cut, find, rank_start


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=12),
    st.integers(0, 60),
    st.integers(1, 6),
    st.integers(1, 30),
)
def test_every_byte_is_where_the_passages_say(lengths: list[int], start: int, blocks: int, size: int) -> None:
    offsets = [1000 * (len(lengths) - number) for number in range(len(lengths))]
    passages = list(zip(offsets, lengths, strict=True))
    bytes_at = [offset + i for offset, length in passages for i in range(length)]
    if start + blocks * size > len(bytes_at):
        with pytest.raises(ValueError, match="passages end"):
            find(passages, start, blocks, size)
        return
    found: list[int] = []
    for span in find(passages, start, blocks, size):
        if isinstance(span, Cut):
            assert span.block == len(found) // size
            assert len(span.parts) > 1
            found += [offset + i for offset, length in span.parts for i in range(length)]
        else:
            assert span.block == len(found) // size
            found += range(span.offset, span.offset + span.blocks * size)
    assert found == bytes_at[start : start + blocks * size]


def test_whole_passages_are_few_copies() -> None:
    assert len(find([(0, 800), (4096, 800)], 0, 16, 100)) == 2
    assert rank_start(2, 8, 100) == 1600


def test_no_passage_is_refused() -> None:
    with pytest.raises(ValueError, match="a passage of"):
        find([(-1, 5)], 0, 1, 1)
