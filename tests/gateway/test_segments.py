"""Ids of pieces, joined, are the ids of the whole; memory is bounded and kept apart by scope."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from gateway.conversation import NotExactError
from gateway.segments import Added, Memory, Segments, stands_alone
from loadtest.tinymodel import build_tokenizer

MARK = "<|im_start|>"


@functools.cache
def plain() -> Tokenizer:
    return build_tokenizer()


@functools.cache
def with_prefix_space() -> Tokenizer:
    made = build_tokenizer()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


@functools.cache
def with_metaspace_first() -> Tokenizer:
    made = build_tokenizer()
    first = pre_tokenizers.Metaspace(replacement="\u0120", prepend_scheme="first")
    made.pre_tokenizer = pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


@functools.cache
def with_normalizer() -> Tokenizer:
    made = build_tokenizer()
    steps = [normalizers.NFKC(), normalizers.Prepend("the "), normalizers.Lowercase()]
    made.normalizer = normalizers.Sequence(steps)
    return made


@functools.cache
def with_greedy_neighbours() -> Tokenizer:
    made = build_tokenizer()
    made.add_tokens([AddedToken("water", rstrip=True, lstrip=True), AddedToken("tool", single_word=True)])
    made.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("|im", normalized=True)])
    return made


TOKENIZERS = [plain, with_prefix_space, with_metaspace_first, with_normalizer, with_greedy_neighbours]
BITS = [
    MARK,
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|im_",
    "start|>",
    "<",
    "|>",
    " ",
    "\n",
    "  ",
    "user",
]
BITS += ["the water", "Water ", " tool", "tool", "_", "é", "e\u0301", "ﬁ", "灯", "🚢", "1999", "'s"]
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=6), max_size=40).map("".join)


@pytest.mark.parametrize("build", TOKENIZERS)
@settings(deadline=None)
@given(TEXTS)
def test_joined_pieces_are_the_whole(build: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = build()
    segments = Segments(tokenizer, [MARK, "<|im_end|>"], Memory(100_000))
    whole = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert list(segments.encode(text, b"", None)) == whole
    assert list(segments.encode(text, b"", None)) == whole  # from memory


def test_the_marks_used_there_stand_alone() -> None:
    for build in TOKENIZERS:
        added = [
            Added(token.content, token.special, token.normalized, token.lstrip, token.single_word)
            for token in build().get_added_tokens_decoder().values()
        ]
        assert all(stands_alone(t, added) for t in added if t.content in (MARK, "<|im_end|>"))


@pytest.mark.parametrize(
    "other",
    [
        Added("x<|im_start|>"),
        Added("<|im_start|>\n"),
        Added("a<"),
        Added("<|im_end|><|im"),
    ],
)
def test_a_token_that_another_may_swallow_does_not_stand_alone(other: Added) -> None:
    assert not stands_alone(Added(MARK), [Added(MARK), other])


@pytest.mark.parametrize(
    "token",
    [
        Added(MARK, lstrip=True),
        Added(MARK, single_word=True),
        Added(MARK, normalized=True),
        Added(MARK, special=False),
        Added("word"),
        Added("_x_"),
        Added("\n\n\n"),
        Added("##"),
        Added("|aa|"),
    ],
)
def test_a_token_that_looks_around_does_not_stand_alone(token: Added) -> None:
    assert not stands_alone(token, [token])


class Counting:
    """Encodes characters, and says which texts it was given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool) -> Any:
        self.given += input
        return [Fake(input[0])]


class Fake:
    def __init__(self, text: str) -> None:
        self.ids = [ord(letter) for letter in text]

    def __len__(self) -> int:
        return len(self.ids)


def test_only_new_turns_are_encoded() -> None:
    encoder = Counting()
    segments = Segments(encoder, ["#"], Memory(10_000))
    segments.encode("#one#two#", b"a", None)
    encoder.given.clear()
    assert segments.encode("#one#two#three#", b"a", None).tolist() == [ord(x) for x in "#one#two#three#"]
    assert encoder.given == ["#three"]
    segments.encode("#one#two#", b"b", None)
    assert encoder.given == ["#three", "#one", "#two", "#"]  # another scope starts anew


def test_two_tokenizers_share_a_memory_but_no_pieces() -> None:
    memory, encoder = Memory(10_000), Counting()
    for _ in range(2):
        Segments(encoder, ["#"], memory).encode("#one#two", b"", None)
    assert encoder.given == ["#one", "#two"] * 2


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory, encoder = Memory(3 * (200 + 8)), Counting()
    segments = Segments(encoder, ["#"], memory)
    for number in range(100):
        segments.encode(f"#{number % 10}#{number // 10}", b"", None)
        assert memory.held_bytes <= 3 * 208
    encoder.given.clear()
    segments.encode("#9#9", b"", None)
    assert encoder.given == []
    huge = Segments(encoder, ["#"], Memory(10))
    assert huge.encode("#a#b", b"", None).tolist() == [ord(x) for x in "#a#b"]


def test_many_pieces_are_encoded_whole_and_too_many_ids_are_refused() -> None:
    encoder = Counting()
    segments = Segments(encoder, ["#"], Memory(10_000))
    text = "#x" * 600
    assert len(segments.encode(text, b"", None)) == 1200
    assert encoder.given == [text]
    with pytest.raises(NotExactError):
        segments.encode("x" * 11, b"", 10)
