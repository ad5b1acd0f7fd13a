"""Identity: keys are golden, do not depend on how tokens arrive, and nothing else leaks into them."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheindex.keys import (
    MAX_TOKEN,
    Chain,
    Extra,
    Namespace,
    Proofs,
    pack_keys,
    pack_tokens,
    prompt_keys,
    proofs,
    text_tokens,
    unpack_keys,
)

SECRET = b"0123456789abcdef"
TOKENS = st.lists(st.integers(0, MAX_TOKEN), max_size=100)


def test_golden_vectors() -> None:
    # Frozen: another value here means that no index, node or peer of an older version agrees.
    root = Namespace("m").root(b"")
    assert root.hex() == "f8e6f560f4fbd6e913aad55f5c0910b1"
    assert [key.hex() for key in prompt_keys(root, range(48))] == [
        "57439361d443147667417ab69392ad39",
        "da515ba148f099ab9cb7c692438b9da5",
        "edc2ffb3fea6aa17b34d7f05458311da",
    ]
    extras = [Extra(3, "img-a"), Extra(20, "img-b")]
    assert [key.hex() for key in prompt_keys(root, range(48), extras)] == [
        "9cd0b341cf73a91b31c8e936bf6ec00f",
        "372af09f703c1b6c111591aee395d823",
        "1eac694853f905b80a0dba72c4688fe1",
    ]
    assert Namespace("m", "lora", "salt").root(SECRET).hex() == "b0f96d7cf9a023c25fa6844c1dc00fd5"
    assert [proof.hex()[:16] for proof in proofs(Namespace("m"), range(64), 32, extras)] == [
        "cbd264f070f725e7",
        "c0d77145144a85c7",
    ]


def test_no_dependence_on_the_hash_seed() -> None:
    code = (
        "from cacheindex.keys import *;"
        "print(prompt_keys(Namespace('m','a').root(b''), range(64), [Extra(5,'x')])[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(seen) == 1


@given(TOKENS, st.lists(st.integers(0, 100), max_size=6))
def test_pieces_give_the_keys_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    chain, keys = Chain(b"r" * 16), list[bytes]()
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    for start, end in pairwise(edges):
        keys += chain.extend(tokens[start:end])
    assert keys == prompt_keys(b"r" * 16, tokens)
    assert chain.length == len(tokens)


def test_a_fork_leaves_its_origin_alone() -> None:
    chain = Chain(b"r" * 16)
    chain.extend(range(20))
    fork = chain.copy()
    fork.extend(range(100))
    assert chain.extend(range(20, 32)) == prompt_keys(b"r" * 16, range(32))[1:]


@given(TOKENS, TOKENS)
def test_different_tokens_have_different_keys(one: list[int], other: list[int]) -> None:
    size = min(len(one), len(other)) // 16 * 16
    first, second = prompt_keys(b"r" * 16, one[:size]), prompt_keys(b"r" * 16, other[:size])
    for index in range(size // 16):
        assert (first[index] == second[index]) == (one[: 16 * index + 16] == other[: 16 * index + 16])


def test_an_extra_changes_its_block_and_those_after_it() -> None:
    plain, extra = (prompt_keys(b"r" * 16, range(64), extras) for extras in ([], [Extra(17, "image")]))
    assert [one == other for one, other in zip(plain, extra, strict=True)] == [True, False, False, False]
    moved = prompt_keys(b"r" * 16, range(64), [Extra(18, "image")])
    renamed = prompt_keys(b"r" * 16, range(64), [Extra(17, "other")])
    assert len({extra[1], moved[1], renamed[1], plain[1]}) == 4
    both = [Extra(17, "b"), Extra(17, "a")]
    assert prompt_keys(b"r" * 16, range(64), both) == prompt_keys(b"r" * 16, range(64), both[::-1])


def test_namespaces_never_meet() -> None:
    names = [
        Namespace("m"),
        Namespace("m", "x"),
        Namespace("m", "", "x"),
        Namespace("mx"),
        Namespace("m", kind="text"),
        Namespace("", "m"),
        Namespace("m\ud800"),
    ]
    assert len({name.encoded() for name in names}) == len({name.root(SECRET) for name in names}) == len(names)


def test_a_salted_root_needs_the_secret() -> None:
    salted = Namespace("m", "", "tenant")
    assert salted.root(SECRET) != salted.root(b"another secret..")
    assert Namespace("m").root(SECRET) == Namespace("m").root(b"")
    with pytest.raises(ValueError, match="secret"):
        salted.root(b"short")


@given(TOKENS, TOKENS, st.sampled_from([16, 32]))
def test_proofs_are_injective(one: list[int], other: list[int], size: int) -> None:
    name = Namespace("m")
    first, second = list(proofs(name, one, size)), list(proofs(name, other, size))
    assert len(first) == len(one) // size
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        end = size * (index + 1)
        assert (left == right) == (one[:end] == other[:end])


@given(
    st.lists(st.integers(0, MAX_TOKEN), max_size=200), st.lists(st.integers(0, 60)), st.sampled_from([16, 48])
)
def test_proofs_grow_in_pieces_of_any_size(tokens: list[int], cuts: list[int], size: int) -> None:
    extras = [Extra(5, "x"), Extra(70, "y")]
    growing = Proofs(Namespace("m"), size, extras)
    found, at = [], 0
    for cut in cuts:
        found += growing.extend(tokens[at : at + cut])
        at += cut
    found += growing.extend(tokens[at:])
    assert found == list(proofs(Namespace("m"), tokens, size, extras))
    assert growing.length == len(tokens)


def test_proofs_cover_namespace_extras_and_length() -> None:
    base = list(proofs(Namespace("m"), range(64), 16))
    assert base[1::2] == list(proofs(Namespace("m"), range(64), 32))
    assert base[0] != next(proofs(Namespace("n"), range(64), 16))
    extra = list(proofs(Namespace("m"), range(64), 16, [Extra(20, "x")]))
    assert extra[0] == base[0]
    assert all(one != other for one, other in zip(extra[1:], base[1:], strict=True))


@pytest.mark.parametrize("bad", [[-1], [2**32], ["1"], [1.5], [None]])
def test_what_is_no_token_is_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        pack_tokens(bad)


def test_text_is_packed_whole() -> None:
    assert list(text_tokens("abcde")) == [int.from_bytes(b"abcd", "little"), ord("e")]
    assert len(text_tokens("\ud800")) == 1
    assert not text_tokens("")


def test_keys_travel_packed() -> None:
    keys = prompt_keys(b"r" * 16, range(64))
    assert unpack_keys(pack_keys(keys)) == keys
    with pytest.raises(ValueError, match="multiple"):
        unpack_keys(b"x" * 17)
