"""Clients that die at every stage: space is never counted twice, and no byte of one record is in another."""

import random

import msgspec

from cachenode.arena import Passage
from cachenode.wire import Grant, Piece
from tests.cachenode.stores import Prompt, Room, layout, prompt

BLOCK = 4096
KILLS = 1000
_PROMPTS = [
    prompt(seed, blocks, shared) for seed, (blocks, shared) in enumerate([(20, 6), (11, 6), (5, 0)] * 8)
]


class Copy(msgspec.Struct):
    """A copy under way: ``data`` still has to be written to (or compared with) these places."""

    write: bool
    passages: list[Passage]
    data: bytes
    number: int
    piece: Piece | None = None


class Client:
    """One simulated engine. Its copies go on after it is lost, as those of a real process would."""

    def __init__(self, room: Room, name: str) -> None:
        self.room, self.name = room, name
        self.copies: list[Copy] = []
        self.lost = False
        room.store.open(name, layout(BLOCK), "map")

    def reserve(self, text: Prompt) -> None:
        grants, _, _ = self.room.store.reserve(self.name, text.reserve())
        self.copies += [
            Copy(True, grant.passages, content(text, grant), grant.reservation) for grant in grants
        ]

    def lease(self, text: Prompt) -> None:
        lease, _, pieces = self.room.store.lease(self.name, text.lease())
        for piece in pieces:
            whole = content(text, Grant(0, piece.first - piece.start, piece.of, []))
            held = whole[BLOCK * piece.start : BLOCK * (piece.start + piece.blocks)]
            self.copies.append(Copy(False, piece.passages, held, lease, piece))

    def go_on(self, rng: random.Random) -> None:
        """End one copy; the owner hears of it unless the client is lost."""
        if not self.copies:
            return
        copy = self.copies.pop(rng.randrange(len(self.copies)))
        if copy.write:
            self.room.write(copy.passages, copy.data)
            if not self.lost:
                end = self.room.store.commit if rng.random() < 0.8 else self.room.store.abort
                assert end(self.name, [copy.number]) == 1
            return
        assert copy.piece is not None
        piece = copy.piece
        data = self.room.read(piece.passages)[BLOCK * piece.start : BLOCK * (piece.start + piece.blocks)]
        if self.room.view.check(piece.slot, piece.generation):
            assert data == copy.data, "another record's bytes"
        if not self.lost and all(other.number != copy.number for other in self.copies):
            self.room.store.release(self.name, [copy.number])

    def kill(self) -> None:
        self.lost = True
        self.room.store.lost(self.name)

    def exit(self) -> None:
        """The process is gone, and with it its copies."""
        self.copies.clear()
        self.room.store.settled(self.name)


def content(text: Prompt, grant: Grant) -> bytes:
    """What a record of these blocks must hold: each block is filled with its key."""
    keys = [text.keys[16 * i : 16 * (i + 1)] for i in range(grant.first, grant.first + grant.blocks)]
    return b"".join(key * (BLOCK // 16) for key in keys)


def test_a_thousand_kills_at_every_stage() -> None:
    room, rng = Room(70 * BLOCK, records=40), random.Random(20)
    clients = [Client(room, f"client-{number}") for number in range(4)]
    dead: list[Client] = []
    kills = 0
    while kills < KILLS:
        client = clients[rng.randrange(len(clients))]
        text = _PROMPTS[rng.randrange(len(_PROMPTS))]
        what = rng.choice(("go on", "go on", "go on", "reserve", "lease"))
        if what == "go on":
            client.go_on(rng)
        elif what == "reserve":
            client.reserve(text)
        else:
            client.lease(text)
        if rng.random() < 0.3:
            kills += 1
            client.kill()
            dead.append(client)
            clients[clients.index(client)] = Client(room, f"client-{kills + 10}")
        for ghost in list(dead):
            ghost.go_on(rng)
            if rng.random() < 0.3:
                ghost.exit()
                dead.remove(ghost)
        if rng.random() < 0.003:
            room.store.clear()
        room.store.work()
        if kills % 5 == 0:
            room.store.check_integrity()
    for client in (*clients, *dead):
        if not client.lost:
            client.kill()
        client.exit()
    room.store.check_integrity()
    now = room.store.figures()
    assert now.quarantined == now.reserved == now.leased == 0
    assert now.counters["evicted_records"] > 30
    assert now.counters["leased_blocks"] > 30
