"""The directory: found by place, proved by proof, never wrong for a reader in the middle of a change."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheindex.keys import KEY_BYTES
from cachenode.directory import Directory
from cachenode.directory_view import DirectoryView, Sizes
from cachenode.record import PROOF_BYTES


def directory(records: int = 64, blocks: int = 512) -> tuple[Directory, DirectoryView]:
    sizes = Sizes.of(records, blocks)
    memory = memoryview(bytearray(sizes.bytes))
    return Directory(memory, sizes), DirectoryView(memory.toreadonly())


def text(seed: int, blocks: int) -> tuple[bytes, bytes]:
    rng = random.Random(seed)
    return rng.randbytes(KEY_BYTES * blocks), rng.randbytes(PROOF_BYTES * blocks)


def test_match_walks_over_records() -> None:
    writer, view = directory()
    places, proofs = text(1, 20)
    assert view.match(places, proofs) == 0
    for start, end in ((0, 8), (8, 16), (16, 18)):
        assert writer.add(places[16 * start : 16 * end], proofs[32 * start : 32 * end])
    assert view.match(places, proofs) == 18
    assert view.match(places[: 16 * 5], proofs[: 32 * 5]) == 5
    writer.check_integrity()


def test_a_sibling_begins_inside_a_record() -> None:
    writer, view = directory()
    places, proofs = text(1, 8)
    other_places, other_proofs = text(2, 4)
    writer.add(places, proofs)
    mixed, mixed_proofs = places[: 16 * 4] + other_places, proofs[: 32 * 4] + other_proofs
    assert view.match(mixed, mixed_proofs) == 4
    writer.add(other_places, other_proofs)
    assert view.match(mixed, mixed_proofs) == 8


def test_a_proof_decides() -> None:
    writer, view = directory()
    places, proofs = text(1, 8)
    writer.add(places, proofs)
    forged = proofs[: 32 * 3] + bytes(32) + proofs[32 * 4 :]
    assert view.match(places, forged) == 3
    found = view.at(places, bytes(len(proofs)), 0)
    assert found.slot >= 0
    assert found.blocks == 0


def test_a_generation_never_comes_twice() -> None:
    writer, view = directory(records=1)
    seen = set[int]()
    for seed in range(10):
        found = writer.add(*text(seed, 3))
        assert found is not None
        assert found.generation not in seen
        seen.add(found.generation)
        assert view.check(found.slot, found.generation)
        assert writer.add(*text(99, 1)) is None
        writer.hide(found.slot)
        assert not view.check(found.slot, found.generation)
        writer.vacate(found.slot)
    assert not view.check(-1, 2)
    assert not view.check(1 << 40, 2)


def test_foreign_memory_is_refused() -> None:
    for memory in (bytes(8192), b"hotpfx\x00\x01" + b"\xff" * 8184):
        with pytest.raises(ValueError, match="no directory of this version"):
            DirectoryView(memoryview(memory))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 9)), max_size=100))
def test_against_a_model(steps: list[tuple[bool, int, int]]) -> None:
    """Mixed lengths, a table that is often full, many places that hash alike."""
    sizes = Sizes(64, 20, 8192)
    memory = memoryview(bytearray(sizes.bytes))
    writer, view = Directory(memory, sizes), DirectoryView(memory.toreadonly())
    held: dict[int, tuple[int, bytes, bytes]] = {}
    for add, seed, blocks in steps:
        if add and seed not in held:
            places, proofs = text(seed, blocks)
            places = bytes([seed % 4]) + bytes(7) + places[8:]
            found = writer.add(places, proofs)
            if found is not None:
                held[seed] = (found.slot, places, proofs)
        elif held:
            slot, _, _ = held.pop(sorted(held)[seed % len(held)])
            writer.hide(slot)
            writer.vacate(slot)
        writer.check_integrity()
        for slot, places, proofs in held.values():
            assert view.match(places, proofs) == len(places) // 16
            assert view.at(places, proofs, 0).slot == slot
            assert writer.places(slot) == places


def test_readers_beside_a_busy_writer() -> None:
    """What a reader finds is always whole, whatever the writer does meanwhile."""
    writer, view = directory(records=16, blocks=128)
    texts = [text(seed, 8) for seed in range(24)]
    stop = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        rng = random.Random(7)
        while not stop.is_set():
            places, _ = texts[rng.randrange(24)]
            _, others = texts[rng.randrange(24)]
            found = view.at(places, others, 0)
            if found.blocks and places != texts[[p for _, p in texts].index(others)][0]:
                wrong.append("a proof of another text was taken")

    reader = threading.Thread(target=read)
    reader.start()
    rng, slots = random.Random(3), list[int]()
    for _ in range(5000):
        if len(slots) > 12 or (slots and rng.random() < 0.4):
            slot = slots.pop(rng.randrange(len(slots)))
            writer.hide(slot)
            writer.vacate(slot)
        else:
            places, proofs = texts[rng.randrange(24)]
            if not writer.begins(places[:16]):
                found = writer.add(places, proofs)
                assert found is not None
                slots.append(found.slot)
    stop.set()
    reader.join()
    assert not wrong
    writer.check_integrity()
