"""The store: what fits, what is found again, what is kept from whom, and that nothing is lost."""

import random

import msgspec
import pytest

from cachenode.record import moved, realm
from cachenode.wire import Piece, Read, Write
from tests.cachenode.stores import Prompt, Room, layout, prompt

BLOCK = 4096


def put(room: Room, session: str, text: Prompt, first: int = 0, end: int | None = None) -> int:
    grants, admitted, _ = room.store.reserve(session, text.reserve(first, end))
    room.store.commit(session, [grant.reservation for grant in grants])
    return admitted


@pytest.fixture
def room() -> Room:
    made = Room(64 * BLOCK)
    made.store.open("s", layout(BLOCK), "map")
    made.store.open("t", layout(BLOCK), "map")
    return made


def test_a_prompt_is_stored_in_chunks_and_leased(room: Room) -> None:
    text = prompt(1, 20)
    grants, admitted, why = room.store.reserve("s", text.reserve())
    assert [(grant.first, grant.blocks) for grant in grants] == [(0, 8), (8, 8), (16, 4)]
    assert (admitted, why) == (20, "")
    assert room.view.match(*places(room, text)) == 0, "not readable before the commit"
    assert room.store.commit("s", [grant.reservation for grant in grants]) == 3
    assert room.view.match(*places(room, text)) == 20
    lease, blocks, pieces = room.store.lease("t", text.lease())
    assert blocks == 20
    assert [(piece.first, piece.blocks, piece.start, piece.of) for piece in pieces] == [
        (0, 8, 0, 8),
        (8, 8, 0, 8),
        (16, 4, 0, 4),
    ]
    assert room.store.figures().leased == 20 * BLOCK
    assert room.store.release("t", [lease, 999]) == 1
    room.store.check_integrity()


def places(room: Room, text: Prompt) -> tuple[bytes, bytes]:
    mask = realm(layout(BLOCK).fingerprint(), "")
    return moved(text.keys, mask), text.proofs


def test_only_what_is_missing_is_stored(room: Room) -> None:
    first, second = prompt(1, 20, shared_blocks=10), prompt(2, 20, shared_blocks=10)
    put(room, "s", first)
    grants, admitted, _ = room.store.reserve("t", second.reserve())
    assert [(grant.first, grant.blocks) for grant in grants] == [(10, 6), (16, 4)]
    assert admitted == 20
    room.store.commit("t", [grant.reservation for grant in grants])
    for text in (first, second):
        lease, blocks, _ = room.store.lease("s", text.lease())
        assert blocks == 20
        room.store.release("s", [lease])
    room.store.check_integrity()


def test_a_step_at_a_time_from_inside_a_chunk(room: Room) -> None:
    """Chunked prefill: each step reserves what it computed; what another engine stored is not stored again."""
    text = prompt(1, 22)
    assert put(room, "s", text, 0, 5) == 5
    grants, admitted, _ = room.store.reserve("t", text.reserve(3, 11))
    assert [(grant.first, grant.blocks) for grant in grants] == [(5, 3), (8, 3)]
    assert admitted == 8
    room.store.commit("t", [grant.reservation for grant in grants])
    assert put(room, "s", text, 11, 22) == 11
    _, blocks, pieces = room.store.lease("s", text.lease(6))
    assert blocks == 16
    assert (pieces[0].first, pieces[0].start, pieces[0].blocks) == (6, 1, 2)
    assert room.store.figures().records == 5
    room.store.check_integrity()


def test_two_engines_reserve_the_same_at_once(room: Room) -> None:
    text = prompt(1, 16)
    mine, _, _ = room.store.reserve("s", text.reserve())
    theirs, admitted, _ = room.store.reserve("t", text.reserve())
    assert theirs == []
    assert admitted == 16
    room.store.abort("s", [grant.reservation for grant in mine])
    again, _, _ = room.store.reserve("t", text.reserve())
    assert len(again) == 2
    room.store.check_integrity()


def test_a_prompt_longer_than_memory_keeps_its_longest_prefix(room: Room) -> None:
    put(room, "s", prompt(5, 40))
    text = prompt(1, 100)
    grants, admitted, why = room.store.reserve("s", text.reserve())
    assert admitted == 64
    assert "memory is full" in why
    room.store.commit("s", [grant.reservation for grant in grants])
    _, blocks, _ = room.store.lease("s", text.lease())
    assert blocks == 64
    assert room.store.figures().free == 0
    room.store.check_integrity()


def test_the_own_prefix_is_not_evicted_for_its_end(room: Room) -> None:
    """Each chunk of a growing prompt is committed before the next is reserved."""
    text = prompt(1, 100)
    total = 0
    for first in range(0, 100, 8):
        total += put(room, "s", text, first, min(100, first + 8))
    assert total == 64
    _, blocks, _ = room.store.lease("s", text.lease())
    assert blocks == 64


def test_a_parent_waits_for_its_child(room: Room) -> None:
    """Between a reservation and its commit another engine fills the memory: what was reserved is found."""
    text = prompt(1, 16)
    put(room, "s", text, 0, 8)
    grants, _, _ = room.store.reserve("s", text.reserve(8))
    for seed in range(2, 12):
        put(room, "t", prompt(seed, 20))
    room.store.check_integrity()
    room.store.commit("s", [grant.reservation for grant in grants])
    assert room.store.lease("s", text.lease())[1] == 16
    room.store.check_integrity()


def test_leased_and_pinned_records_stay(room: Room) -> None:
    leased, pinned = prompt(1, 24), prompt(2, 24)
    put(room, "s", leased)
    put(room, "s", pinned)
    room.store.lease("s", leased.lease())
    assert room.store.pin(layout(BLOCK).fingerprint(), pinned.keys) == 24
    assert put(room, "t", prompt(3, 64)) == 16
    for text in (leased, pinned):
        assert room.store.lease("t", text.lease())[1] == 24
    assert room.store.unpin(layout(BLOCK).fingerprint(), pinned.keys) == 24
    assert room.store.unpin(layout(BLOCK).fingerprint(), pinned.keys) == 0
    room.store.check_integrity()


def test_lost_sessions_are_quarantined_until_settled(room: Room) -> None:
    text, other = prompt(1, 16), prompt(2, 16)
    put(room, "s", text)
    room.store.lease("s", text.lease())
    grants, _, _ = room.store.reserve("s", other.reserve())
    room.store.lost("s")
    now = room.store.figures()
    assert now.quarantined == 32 * BLOCK
    assert room.store.commit("s", [grant.reservation for grant in grants]) == 0
    assert room.store.lease("t", text.lease())[1] == 16, "what is only read stays findable"
    assert room.store.figures().quarantined == 16 * BLOCK
    assert put(room, "t", prompt(3, 64)) == 32
    room.store.check_integrity()
    room.store.settled("s")
    room.store.settled("s")
    assert room.store.figures().quarantined == 0
    assert put(room, "t", prompt(4, 64)) == 48
    room.store.check_integrity()


def test_copy_mode_needs_no_quarantine(room: Room) -> None:
    room.store.open("c", layout(BLOCK), "copy")
    room.store.reserve("c", prompt(1, 16).reserve())
    room.store.lost("c")
    assert room.store.figures().free == 64 * BLOCK
    room.store.check_integrity()


def test_clear_marks_now_and_frees_with_the_last_lease(room: Room) -> None:
    read, idle, late = prompt(1, 16), prompt(2, 16), prompt(3, 16)
    put(room, "s", read)
    put(room, "s", idle)
    coming, _, _ = room.store.reserve("s", late.reserve())
    lease, _, _ = room.store.lease("s", read.lease())
    assert room.store.forget("t") == 4
    while room.store.work():
        pass
    assert room.heard.keys == {layout(BLOCK).fingerprint(): []}
    for text in (read, idle):
        assert room.store.lease("t", text.lease()) == (0, 0, [])
    room.store.commit("s", [grant.reservation for grant in coming])
    assert room.store.figures().leased == 16 * BLOCK
    room.store.check_integrity()
    room.store.release("s", [lease])
    assert room.store.figures().free == 64 * BLOCK
    room.store.check_integrity()


def test_clear_spares_other_layouts_and_what_comes_after(room: Room) -> None:
    room.store.open("o", layout(BLOCK, memory="other/1"), "map")
    text = prompt(1, 8)
    put(room, "s", text)
    put(room, "o", text)
    assert room.store.clear(layout(BLOCK).fingerprint()) == 1
    later = prompt(2, 8)
    put(room, "s", later)
    while room.store.work():
        pass
    assert room.store.lease("o", text.lease())[1] == 8
    assert room.store.lease("s", later.lease())[1] == 8
    assert room.store.lease("s", text.lease())[1] == 0


def test_layouts_and_adapters_never_meet(room: Room) -> None:
    text = prompt(1, 8)
    put(room, "s", text)
    room.store.open("o", layout(BLOCK, memory="other/1"), "map")
    assert room.store.lease("o", text.lease()) == (0, 0, [])
    adapted = msgspec.structs.replace(text.lease(), adapter="d1")
    assert room.store.lease("s", adapted) == (0, 0, [])


def test_a_forged_key_never_overwrites(room: Room) -> None:
    text = prompt(1, 8)
    put(room, "s", text)
    forged = msgspec.structs.replace(text.reserve(), proofs=bytes(len(text.proofs)))
    assert room.store.reserve("t", forged) == ([], 0, "another text has the same key")
    coming = prompt(2, 8)
    room.store.reserve("s", coming.reserve())
    forged = msgspec.structs.replace(coming.reserve(), proofs=bytes(len(text.proofs)))
    assert room.store.reserve("t", forged) == ([], 0, "another text has the same key")
    assert room.store.figures().counters["conflicts"] == 2


def test_the_directory_can_be_the_bottleneck() -> None:
    room = Room(64 * BLOCK, records=4)
    room.store.open("s", layout(BLOCK), "map")
    for seed in range(9):
        assert put(room, "s", prompt(seed, 8)) == 8
        room.store.check_integrity()
    assert room.store.figures().records == 4


def test_stored_is_said_after_and_removed_before(room: Room) -> None:
    rng = random.Random(4)
    for _ in range(60):
        put(room, "s", prompt(rng.randrange(20), rng.randrange(1, 30), shared_blocks=0))
        said = sorted(room.heard.keys[layout(BLOCK).fingerprint()])
        packed = [keys for _, _, keys in room.store.held()]
        held = sorted(keys[i : i + 16] for keys in packed for i in range(0, len(keys), 16))
        assert said == held


def test_parts_of_ranks_for_copies_through_the_socket() -> None:
    room = Room(64 * BLOCK)
    room.store.open("c", layout(BLOCK, ranks=2), "copy")
    text = prompt(1, 4)
    grants, _, _ = room.store.reserve("c", text.reserve())
    number = grants[0].reservation
    whole = grants[0].passages
    second = room.store.target("c", Write(1, number, 1, 0, bytes(4 * BLOCK)))
    assert second == [(whole[0][0] + 4 * BLOCK, 4 * BLOCK)]
    for rank, offset, size in ((2, 0, 1), (-1, 0, 1), (0, 4 * BLOCK, 1), (0, -1, 2), (0, 0, 4 * BLOCK + 1)):
        assert room.store.target("c", Write(1, number, rank, offset, bytes(size))) == []
    room.store.commit("c", [number])
    lease, _, pieces = room.store.lease("c", text.lease(2))
    assert isinstance(pieces[0], Piece)
    assert room.store.source("c", Read(1, lease, 0, 1, 0, BLOCK)) == [(whole[0][0] + 6 * BLOCK, BLOCK)]
    for piece, offset, length in ((1, 0, 1), (0, 2 * BLOCK, 1), (0, -1, 1), (0, 0, 2 * BLOCK + 1)):
        assert room.store.source("c", Read(1, lease, piece, 1, offset, length)) == []
