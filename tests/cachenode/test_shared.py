"""Memory files and frames: what the kernel enforces, and what a stream may hold."""

import mmap
import os
import random

import msgspec
import pytest

from cachenode import shared, wire
from cachenode.record import BadLayout, moved, realm
from tests.cachenode.stores import layout, prompt


def test_a_sealed_file_gets_no_new_writer() -> None:
    fd = shared.memory_file("t", 8192)
    mine = shared.map_fd(fd, 8192, write=True)
    shared.seal(fd, writers=False)
    mine[0] = 7
    assert shared.map_fd(fd, 8192, write=False)[0] == 7
    with pytest.raises(PermissionError):
        shared.map_fd(fd, 8192, write=True)
    with pytest.raises(PermissionError):
        shared.seal(fd, writers=False)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_a_file_shorter_than_promised_is_refused() -> None:
    fd = shared.memory_file("t", 4096)
    with pytest.raises(OSError, match="were promised"):
        shared.map_fd(fd, 8192, write=False)
    os.close(fd)


def test_touch_takes_the_pages_and_changes_nothing() -> None:
    fd = shared.memory_file("t", 1 << 20)
    mapping: mmap.mmap = shared.map_fd(fd, 1 << 20, write=True)
    mapping[5000] = 9
    assert os.fstat(fd).st_blocks * 512 == 4096
    shared.touch(mapping)
    assert os.fstat(fd).st_blocks * 512 == 1 << 20
    assert mapping[5000] == 9
    os.close(fd)


def test_frames_arrive_in_any_pieces() -> None:
    rng = random.Random(1)
    sent: list[wire.Request] = [prompt(seed, 5).reserve() for seed in range(20)]
    sent += [wire.Commit(3, [1, 2]), wire.Ping(4)]
    stream = b"".join(wire.frame(one) for one in sent)
    frames, got = wire.Frames(), list[wire.Request]()
    while stream:
        cut = rng.randrange(1, 300)
        got += [wire.request(body) for body in frames.feed(stream[:cut])]
        stream = stream[cut:]
    assert got == sent
    assert frames.waiting == 0
    with pytest.raises(ValueError, match="at most"):
        wire.frame(wire.Write(1, 1, 0, 0, bytes(wire.MAX_FRAME)))


@pytest.mark.parametrize("field", ["layers", "block_tokens", "block_bytes", "ranks"])
def test_layouts_that_cannot_be(field: str) -> None:
    with pytest.raises(BadLayout, match=field):
        msgspec.structs.replace(layout(), **{field: 0}).check()


def test_fingerprints_differ_in_every_field() -> None:
    base = layout()
    seen = {base.fingerprint()}
    for field in base.__struct_fields__:
        value = getattr(base, field)
        other = msgspec.structs.replace(base, **{field: value + 1 if isinstance(value, int) else value + "x"})
        seen.add(other.fingerprint())
    assert len(seen) == 1 + len(base.__struct_fields__)


def test_places_and_keys_lead_to_each_other() -> None:
    keys, mask = random.Random(2).randbytes(160), realm("f", "adapter")
    assert moved(moved(keys, mask), mask) == keys
    assert moved(b"", mask) == b""
    assert realm("f", "a") != realm("fa", "")
