"""Messages and frames: what is sent arrives, cut anywhere; what is no message is said to be none."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachenode import wire
from tests.cachenode.stores import layout

REQUESTS: list[wire.Request] = [
    wire.Hello(1, wire.VERSION, "worker", "s" * 16, "w", 3, layout(), "copy", ["old"]),
    wire.Reserve(2, 8, b"k" * 32, b"p" * 64, "adapter", b"q" * 16, 1),
    wire.Commit(3, [1, 2]),
    wire.Abort(4, []),
    wire.Lease(5, 0, b"k" * 16, b"p" * 32),
    wire.Release(6, [9]),
    wire.Forget(7),
    wire.Quiet(8, ["a", "b"]),
    wire.Ping(9),
    wire.Write(10, 1, 0, 4096, b"bytes"),
    wire.Read(11, 1, 2, 3, 4, 5),
]
REPLIES: list[wire.Reply] = [
    wire.Welcome(1, "b", "n", "f", "map", 1 << 40, 4096),
    wire.Reserved(2, "b", [wire.Grant(1, 8, 2, [(0, 4096), (8192, 4096)])], 2, "full"),
    wire.Leased(3, "b", 7, 4, [wire.Piece(1, 2, 3, 4, 5, 6, [(0, 1)])]),
    wire.Done(4, "b", 2),
    wire.Data(5, "b", bytes(range(256))),
    wire.Failed(-1, "b", "code", "message", True),
]


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: wire.Request | wire.Reply) -> None:
    (body,) = wire.Frames().feed(wire.frame(message))
    read = wire.request if message in REQUESTS else wire.reply
    assert read(body) == message


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 50), max_size=30))
def test_a_stream_cut_anywhere_is_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames, found, at = wire.Frames(), list[bytes](), 0
    for cut in [*cuts, len(stream)]:
        found += frames.feed(stream[at : at + cut])
        at += cut
    assert found == bodies
    assert frames.waiting == 0


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME + 1, (1 << 32) - 1])
def test_lengths_out_of_bounds(length: int) -> None:
    with pytest.raises(wire.BadFrame):
        wire.Frames().feed(length.to_bytes(4, "little"))


def test_the_longest_frame_and_one_that_is_too_long() -> None:
    longest = wire.MAX_FRAME - len(wire.frame(wire.Data(1, "b", bytes(1 << 16)))) + 4 + (1 << 16)
    frame = wire.frame(wire.Data(1, "b", bytes(longest)))
    assert len(frame) == 4 + wire.MAX_FRAME
    assert len(wire.Frames().feed(frame)) == 1
    with pytest.raises(ValueError, match="at most"):
        wire.frame(wire.Data(1, "b", bytes(longest + 1)))


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (msgspec.msgpack.encode(["unknown", 7, {}]), 7),
        (msgspec.msgpack.encode(["reserve", 7]), 7),
        (msgspec.msgpack.encode(["ping", True]), -1),
        (msgspec.msgpack.encode(["unknown", -3]), -1),
        (msgspec.msgpack.encode(["ping"]), -1),
        (msgspec.msgpack.encode({"id": 7}), -1),
        (b"\x91" * 100_000, -1),
        (b"\xc1", -1),
        (b"", -1),
    ],
)
def test_what_is_no_request_may_have_a_number(body: bytes, number: int) -> None:
    with pytest.raises(wire.BadFrame):
        wire.request(body)
    assert wire.request_id(body) == number
