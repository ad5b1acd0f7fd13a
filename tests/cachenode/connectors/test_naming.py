"""A request's names are the gateway's keys and nobody else's proofs, however the tokens arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheindex.keys import Extra, Namespace, prompt_keys, proofs
from cachenode.connectors.naming import Asked, Namer, Names

SECRET = b"0123456789abcdef"
TOKENS = list(range(300))


def names(asked: Asked, block: int = 32, secret: bytes | None = None) -> Names:
    found = Namer("m", block, secret).names(asked)
    assert isinstance(found, Names)
    return found


@given(st.lists(st.integers(0, 120)), st.sampled_from([16, 32, 48]))
def test_names_grow_with_the_request(cuts: list[int], block: int) -> None:
    growing, at = names(Asked(items=(("img", 40),)), block), 0
    for cut in cuts:
        growing.extend(TOKENS[at : at + cut])
        at = min(at + cut, len(TOKENS))
        assert growing.blocks == at // block
    growing.extend(TOKENS[at:])
    extras, full = [Extra(40, "img")], len(TOKENS) // block
    keys = prompt_keys(Namespace("m").root(b""), TOKENS, extras)
    per = block // 16
    assert growing.keys(0, full) == b"".join(keys[per - 1 :: per])
    assert growing.proofs(0, full) == b"".join(proofs(Namespace("m"), TOKENS, block, extras))
    assert growing.parent(0) == b""
    assert growing.parent(2) == keys[2 * per - 1]


def test_keys_are_the_gateways_and_proofs_cover_the_adapters_files() -> None:
    first = names(Asked(adapter="a", adapter_digest="f1"))
    second = names(Asked(adapter="a", adapter_digest="f2"))
    for one in (first, second):
        one.extend(TOKENS)
        assert one.keys(0, 1) == prompt_keys(Namespace("m", "a").root(b""), TOKENS)[1]
    assert first.proofs(0, 9) != second.proofs(0, 9)
    assert (first.adapter, second.adapter) == ("f1", "f2")


def test_a_salt_keeps_texts_apart() -> None:
    plain, one, two = (names(Asked(salt=salt), secret=SECRET) for salt in ("", "a", "b"))
    for each in (plain, one, two):
        each.extend(TOKENS)
    assert one.keys(0, 1) == prompt_keys(Namespace("m", "", "a").root(SECRET), TOKENS)[1]
    assert len({each.keys(0, 1) for each in (plain, one, two)}) == 3
    assert len({each.proofs(0, 1) for each in (plain, one, two)}) == 3


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Asked(embeddings=True), "embeddings"),
        (Asked(streaming=True), "streaming"),
        (Asked(salt="a"), "salt_without_secret"),
        (Asked(adapter="a", adapter_digest=None), "adapter_unread"),
        (Asked(items=(("img", 0), (None, 40))), "unnamed_item"),
    ],
)
def test_some_requests_have_no_names(asked: Asked, why: str) -> None:
    assert Namer("m", 32, None).names(asked) == why
