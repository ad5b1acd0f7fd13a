"""Engines' dialects: every recorded shape reads the same, and nothing hostile does more than count."""

import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_fakes import CLEARED, END, batch, frames, payload, removed, stored

from cacheindex.engine_events import (
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    AllCleared,
    BadFrame,
    BlockExtras,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    ReplayEnd,
    parse,
    parse_replay,
    replay_request,
)
from cacheindex.engine_state import Translator

FIRST, SECOND, PARENT = 2**64 - 1, 12, 7


def read(*events: object) -> EngineBatch:
    return parse(frames(3, msgspec.msgpack.encode([1.5, list(events)])))


# One block pair as different engines and versions send it.
CORPUS: dict[str, object] = {
    "vLLM 0.32, map": stored(
        [FIRST, SECOND],
        PARENT,
        range(32),
        16,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
        locality=None,
        ownership=None,
        session_id=None,
    ),
    "vLLM, array with all fields": [
        "BlockStored",
        [FIRST, SECOND],
        PARENT,
        list(range(32)),
        16,
        None,
        "GPU",
        None,
        [None, None],
        0,
        "full_attention",
        None,
    ],
    "vLLM, early array": ["BlockStored", [FIRST, SECOND], PARENT, list(range(32)), 16, None],
    "SGLang, array": ["BlockStored", [FIRST, SECOND], PARENT, list(range(32)), 16, None, "gpu"],
    "an unknown field": stored([FIRST, SECOND], PARENT, range(32), 16, token_offset=32),
    "unknown trailing fields": [
        "BlockStored", [FIRST, SECOND], PARENT, list(range(32)), 16, None, None, None, None, None,
        "full_attention", None, None, None, "session", "new", {"newer": 1},
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", CORPUS)
def test_every_shape_reads_the_same(shape: str) -> None:
    (event,) = read(CORPUS[shape]).events
    assert isinstance(event, BlockStored)
    assert (event.hashes, event.parent, event.tokens) == ((FIRST, SECOND), PARENT, list(range(32)))
    assert (event.block_size, event.tier, event.group, event.adapter) == (16, "gpu", 0, "")


RECORDED = bytes.fromhex(
    "93cb4029000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffffffffffff"
    "ffff0cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0020000102030405060708090a0b0c0d0e"
    "0f101112131415161718191a1b1c1d1e1faa626c6f636b5f73697a6510a76c6f72615f696401a66d656469756da3475055a9"
    "6c6f72615f6e616d65a26164aa65787472615f6b6579739293a2616492a3696d6703a17392a2616492a3696d67f3a967726f"
    "75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c"
    "6f636b52656d6f766564ac626c6f636b5f68617368657391c420010101010101010101010101010101010101010101010101"
    "0101010101010101a66d656469756da3435055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c6561"
    "72656400"
)
"""A batch as vLLM 0.32's own classes write it: adapter, image, salt, a removal from CPU, all cleared."""


def test_a_recorded_batch() -> None:
    got = parse(frames(0, RECORDED))
    assert (got.timestamp, got.rank, got.skipped) == (12.5, 0, {})
    assert got.events == (
        BlockStored(
            hashes=(FIRST, SECOND),
            parent=None,
            tokens=list(range(32)),
            block_size=16,
            tier="gpu",
            adapter="ad",
            kind="full_attention",
            extras=(BlockExtras(("s",), (("img", 3),)), BlockExtras((), (("img", -13),))),
        ),
        BlockRemoved(hashes=(b"\x01" * 32,), tier="memory"),
        AllCleared(tier=None),
    )


@pytest.mark.parametrize(
    ("raw", "tier"),
    [
        (["BlockRemoved", [1, 2]], "gpu"),
        (["BlockRemoved", [1, 2], "CPU"], "memory"),
        ({"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "STORAGE", "group_idx": 0}, "disk"),
        (removed([1, 2], "Storage", locality="REMOTE"), "remote"),
        (removed([1, 2], None), "gpu"),
        (removed([1, 2], "tape"), None),
        (removed([1, 2], 4),  None),
    ],
)  # fmt: skip
def test_removals_and_media(raw: object, tier: str | None) -> None:
    assert read(raw).events == (BlockRemoved(hashes=(1, 2), tier=tier, group=0),)  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [CLEARED, ["AllBlocksCleared"]])
def test_cleared(raw: object) -> None:
    assert read(raw).events == (AllCleared(tier=None),)


def test_hash_forms_stay_apart() -> None:
    (event,) = read(removed([1, b"\x01", "1", -5])).events
    assert isinstance(event, BlockRemoved)
    assert event.hashes == (1, b"\x01", "1", -5)


def test_what_is_not_understood_is_counted() -> None:
    got = read(
        ["BlockTransferred", 1, 2],
        {"type": "Unheard"},
        {},
        [],
        7,
        None,
        stored([1], None, range(16), 16, novel=1, newer=2),
        stored([1.5], None, range(16), 16),
        stored([True], None, range(16), 16),
        stored([1], [2], range(16), 16),
        {"type": "BlockRemoved"},
    )
    assert len(got.events) == 1
    assert got.skipped == {"unknown_event": 6, "unknown_field": 2, "bad_event": 4}


def test_extra_keys() -> None:
    event = stored(
        [1, 2, 3],
        None,
        range(48),
        16,
        lora_name="lora",
        extra_keys=[["lora", ["img", 4], "salt"], ["lora", ["img", -12]], ["lora", b"digest"]],
    )
    (got,) = read(event).events
    assert isinstance(got, BlockStored)
    assert got.extras == (
        BlockExtras(("salt",), (("img", 4),)),
        BlockExtras((), (("img", -12),)),
        BlockExtras((), (), True),
    )
    assert got.adapter == "lora"
    assert "salt" not in repr(got)


def test_a_replay_in_both_forms() -> None:
    data = payload([CLEARED])
    for answer in ([b"", *frames(5, data)], [b"", *frames(5, data)[1:]]):
        got = parse_replay(answer)
        assert isinstance(got, EngineBatch)
        assert got.seq == 5
    assert parse_replay([b"", b"", END, b""]) is ReplayEnd
    assert parse_replay([b"", END, b""]) is ReplayEnd
    assert replay_request(258) == [b"", b"\0" * 6 + b"\x01\x02"]


@pytest.mark.parametrize(
    "hostile",
    [
        [],
        [b"topic"],
        [b"", b"", b"", b""],
        frames(1, b""),
        frames(1, b"\xc1"),
        frames(1, b"\x91" * 100_000),
        frames(1, b"\xdd\xff\xff\xff\xff"),
        frames(1, msgspec.msgpack.encode({"ts": 1})),
        frames(1, msgspec.msgpack.encode([1, {"not": "a list"}])),
        frames(1, msgspec.msgpack.encode([1, [[]] * (MAX_EVENTS + 1)])),
        frames(1, b"x" * (MAX_FRAME_BYTES + 1)),
        [b"t", b"\0\0\0\1", payload([])],
        [b"t", b"\xff" * 8, payload([])],
    ],
    ids=lambda value: str(len(value)),
)
def test_hostile_frames_are_bad_frames(hostile: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        parse(hostile)


def junk(rng: random.Random, depth: int = 0) -> object:
    """Any msgpack value, small."""
    if depth < 3 and rng.random() < 0.4:
        inner = [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
        return inner if rng.random() < 0.6 else {str(index): value for index, value in enumerate(inner)}
    return rng.choice(
        [None, True, 0, -1, 2**64 - 1, -(2**63), 1.5, float("nan"), "", "GPU", "\u2028", b"", b"\xff" * 9]
    )


def nearly_an_event(rng: random.Random) -> object:
    event: dict[str, object] = {
        **rng.choice([stored([1], None, range(16), 16), removed([1]), CLEARED]),
        "extra_keys": [None],
        "group_idx": 0,
    }
    for field in rng.sample(sorted(event), rng.randrange(1, 4)):
        event[field] = junk(rng)
    return event if rng.random() < 0.6 else list(event.values())


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_bad_frame_is_raised(seed: int) -> None:
    """4 x 500 payloads: nearly right, wrong, and torn."""
    rng = random.Random(seed)
    for _ in range(500):
        events = [nearly_an_event(rng) if rng.random() < 0.7 else junk(rng) for _ in range(rng.randrange(4))]
        data = bytearray(msgspec.msgpack.encode(junk(rng) if rng.random() < 0.1 else [0.5, events]))
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            got = parse(frames(0, bytes(data)))
        except BadFrame:
            continue
        translator = Translator("m", b"0" * 16)
        translator.apply(got)
        translator.check_integrity()


@given(st.lists(st.binary(max_size=12), max_size=6))
@settings(max_examples=100)
def test_any_frames(parts: list[bytes]) -> None:
    for read_ in (parse, parse_replay):
        with suppress(BadFrame):
            read_(parts)


def test_a_digest_tells_batches_apart() -> None:
    one, other = (batch(stored([n], None, range(16), 16)) for n in (1, 2))
    assert one.digest != other.digest
    assert one.digest == batch(stored([1], None, range(16), 16)).digest
