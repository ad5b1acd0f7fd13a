"""Our own events: what is written is read again, what is hostile is refused as such."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheindex.events import (
    TIERS,
    VERSION,
    BadEvent,
    Batch,
    Cleared,
    Event,
    Heartbeat,
    Removed,
    Replay,
    Snapshot,
    Stored,
    decode_batch,
    decode_request,
    encode,
)

KEYS = st.integers(0, 4).map(lambda count: bytes(range(16)) * count)
TIER = st.sampled_from(TIERS)
EVENT: st.SearchStrategy[Event] = st.one_of(
    st.builds(Stored, TIER, st.text(max_size=9), KEYS),
    st.builds(Removed, TIER, st.text(max_size=9), KEYS),
    st.builds(Cleared, TIER, st.text(max_size=9)),
    st.builds(
        Heartbeat,
        st.integers(0, 2**62),
        st.dictionaries(st.text(max_size=5), st.integers(0, 2**62)),
        st.dictionaries(st.text(max_size=5), st.floats(0, 1e12)),
        st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5))),
    ),
)
BATCH = st.builds(
    Batch, st.just(VERSION), st.text(max_size=9), st.text(max_size=9), st.integers(0, 2**62), st.lists(EVENT)
)


@given(BATCH)
@settings(max_examples=40)
def test_batches_survive_the_wire(batch: Batch) -> None:
    assert decode_batch(encode(batch)) == batch


@pytest.mark.parametrize("request_", [Replay(7), Snapshot()])
def test_requests_survive_the_wire(request_: Replay | Snapshot) -> None:
    assert decode_request(encode(request_)) == request_


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_batch, decode_request):
        with pytest.raises(BadEvent):
            decode(data)


@given(BATCH, st.data())
@settings(max_examples=60)
def test_damage_is_refused_or_read(batch: Batch, data: st.DataObject) -> None:
    wire = bytearray(encode(batch))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with suppress(BadEvent):
        decode_batch(bytes(wire))


@pytest.mark.parametrize(
    "batch",
    [
        Batch(VERSION + 1, "s", "e", 0, []),
        Batch(VERSION, "s", "e", -1, []),
        Batch(VERSION, "s", "e", 0, [Stored("gpu", "l", b"x" * 15)]),
    ],
)
def test_what_breaks_the_rules_is_refused(batch: Batch) -> None:
    with pytest.raises(BadEvent):
        decode_batch(encode(batch))


def test_nesting_and_sizes_are_bounded() -> None:
    for hostile in (b"\x91" * 100_000 + b"\xc0", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(BadEvent):
            decode_batch(hostile)
    many = msgspec.msgpack.encode(["batch", VERSION, "s", "e", 0, [["cleared", "gpu", ""]] * 70_000])
    with pytest.raises(BadEvent, match="70000 events"):
        decode_batch(many)
