"""Two texts, two salts, two adapters, two layouts with equal leading bytes never meet: in their names, in the
store and its directory, and over the control socket. A forged key is a miss, and overwrites nothing."""

import itertools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from cachenode.arena import Passage, Space
from cachenode.attachment import Attachment
from cachenode.client import NodeClient
from cachenode.directory import Directory
from cachenode.directory_view import DirectoryView, Sizes
from cachenode.store import Store
from cachenode.wire import Grant, Lease, Leased, Piece, Reply, Reserve, Reserved
from loadtest.harness import socket_folder, wait_until
from policies.eviction import DEFAULT, build
from tests.cachenode.identities import KINDS, Named, Prompt, forged, pair
from tests.cachenode.living import Deaf, LivingNode

CASES = {"names": 400, "store": 200, "socket": 80}
"""Of each kind, by what they run through."""

ARENA = 1 << 21


@pytest.mark.parametrize("kind", KINDS)
def test_names_part_where_prompts_do(kind: str) -> None:
    """Before the difference all is equal; from there on no place and no proof is."""
    for seed in range(CASES["names"]):
        one, other, differs = pair(seed, kind)
        first, second = one.places(), other.places()
        proofs, others = one.proofs(), other.proofs()
        assert (first[:differs], proofs[:differs]) == (second[:differs], others[:differs])
        assert set(first[differs:]).isdisjoint(second), (kind, seed)
        if kind not in {"layout", "secret"}:  # a proof is of the text; what bytes mean is in the place
            assert set(proofs[differs:]).isdisjoint(others), (kind, seed)


def test_no_two_names_of_many_prompts_are_alike() -> None:
    """Across all cases at once: a name says everything that it stands for."""
    seen: dict[bytes, tuple[object, ...]] = {}
    for kind, seed in itertools.product(KINDS, range(60)):
        for prompt in pair(seed, kind)[:2]:
            for number, (place, proof) in enumerate(zip(prompt.places(), prompt.proofs(), strict=True)):
                text = meaning(prompt, number)
                bytes_too = (prompt.layout, prompt.secret if prompt.asked.salt else b"", *text)
                assert seen.setdefault(place, bytes_too) == bytes_too
                assert seen.setdefault(proof, text) == text
    assert len(seen) > 5_000


def meaning(prompt: Prompt, number: int) -> tuple[object, ...]:
    """All of the text that block ``number`` depends on, and whose it is."""
    end, asked = (number + 1) * prompt.layout.block_tokens, prompt.asked
    items = tuple((name, at) for name, at in asked.items if at < end)
    whose = (prompt.layout.model, asked.salt, asked.adapter, asked.adapter_digest)
    return (*whose, items, prompt.tokens[:end])


Writable = bytearray | memoryview


class Node(Protocol):
    """A node as these tests use one. ``save`` writes each granted block's stamp; ``load`` gives what it read."""

    through: str

    def match(self, named: Named) -> int: ...
    def save(self, named: Named) -> int: ...
    def load(self, named: Named) -> list[bytes]: ...


class Direct:
    """A store, its directory and an arena of this process; a session for each layout."""

    through = "store"

    def __init__(self) -> None:
        sizes = Sizes.of(2_000, 8_000)
        self.arena, table = bytearray(ARENA), memoryview(bytearray(sizes.bytes))
        self.store = Store(Space(ARENA), Directory(table, sizes), build({"name": DEFAULT}, ARENA), Deaf())
        self.view = DirectoryView(table.toreadonly())
        self.sessions: set[str] = set()

    def _session(self, named: Named) -> str:
        name = named.layout.fingerprint()
        if name not in self.sessions:
            self.sessions.add(name)
            self.store.open(name, named.layout, "map")
        return name

    def match(self, named: Named) -> int:
        return self.view.match(named.places(), named.proofs)

    def save(self, named: Named) -> int:
        session = self._session(named)
        ask = Reserve(0, 0, named.keys, named.proofs, named.adapter)
        grants, admitted, _ = self.store.reserve(session, ask)
        for grant in grants:
            write(self.arena, named, grant)
        self.store.commit(session, [grant.reservation for grant in grants])
        return admitted

    def load(self, named: Named) -> list[bytes]:
        session = self._session(named)
        lease, blocks, pieces = self.store.lease(
            session, Lease(0, 0, named.keys, named.proofs, named.adapter)
        )
        found = [block for piece in pieces for block in read(self.arena, named, piece)]
        self.store.release(session, [lease])
        assert len(found) == blocks
        return found


def write(arena: Writable, named: Named, grant: Grant) -> None:
    """Every rank's part: its number, then the blocks' stamps cut by one byte."""
    stamps = [named.stamp(number) for number in range(grant.first, grant.first + grant.blocks)]
    data = b"".join(bytes([rank]) + stamp[1:] for rank in range(named.layout.ranks) for stamp in stamps)
    where = places_of(grant.passages)
    assert len(where) >= len(data)
    for at, byte in zip(where, data, strict=False):
        arena[at] = byte


def read(arena: Writable, named: Named, piece: Piece) -> list[bytes]:
    """The blocks of a piece, each as all ranks' bytes."""
    size, where = named.layout.block_bytes, places_of(piece.passages)
    found = []
    for number in range(piece.start, piece.start + piece.blocks):
        starts = [(rank * piece.of + number) * size for rank in range(named.layout.ranks)]
        found.append(b"".join(bytes(arena[at] for at in where[start : start + size]) for start in starts))
    return found


def places_of(passages: list[Passage]) -> list[int]:
    return [offset + at for offset, length in passages for at in range(length)]


def own(named: Named, blocks: int) -> list[bytes]:
    """What ``load`` must give of the leading blocks."""
    ranks = range(named.layout.ranks)
    return [b"".join(bytes([rank]) + named.stamp(n)[1:] for rank in ranks) for n in range(blocks)]


class Remote:
    """A node behind its socket; a scheduler and its workers for each layout."""

    through = "socket"

    def __init__(self, living: LivingNode) -> None:
        self.living = living
        self.clients: dict[str, NodeClient] = {}
        self.workers: dict[str, list[Attachment]] = {}

    def _client(self, named: Named) -> NodeClient:
        name = named.layout.fingerprint()
        if name not in self.clients:
            client = NodeClient(
                self.living.path, named.layout, "w", lambda: f"session {name}", time.monotonic
            )
            wait_until(lambda: (client.poll(), client.connected)[1], 10.0)
            self.clients[name] = client
            ranks = range(named.layout.ranks)
            joined = [
                Attachment.join(self.living.path, named.layout, "w", client.session, rank=rank)
                for rank in ranks
            ]
            self.workers[name] = [worker for worker in joined if worker is not None]
            assert len(self.workers[name]) == named.layout.ranks
        return self.clients[name]

    def match(self, named: Named) -> int:
        return self._client(named).match(named.adapter, named.keys, named.proofs)

    def save(self, named: Named) -> int:
        client = self._client(named)
        reply = answer(client, client.reserve(0, named.keys, named.proofs, named.adapter))
        assert isinstance(reply, Reserved)
        for grant in reply.grants:
            write(memoryview(self._arena(named)), named, grant)
        answer(client, client.commit([grant.reservation for grant in reply.grants]))
        return reply.admitted

    def load(self, named: Named) -> list[bytes]:
        client = self._client(named)
        reply = answer(client, client.lease(0, named.keys, named.proofs, named.adapter))
        assert isinstance(reply, Leased)
        arena = memoryview(self._arena(named))
        found = [block for piece in reply.pieces for block in read(arena, named, piece)]
        worker = self.workers[named.layout.fingerprint()][-1]
        assert all(worker.valid(piece.slot, piece.generation) for piece in reply.pieces)
        client.release([reply.lease])
        assert len(found) == reply.blocks
        return found

    def _arena(self, named: Named) -> Any:
        return self.workers[named.layout.fingerprint()][0].arena

    def close(self) -> None:
        for name, client in self.clients.items():
            for worker in self.workers[name]:
                worker.close()
            client.close()


def answer(client: NodeClient, ticket: int | None) -> Reply:
    assert ticket is not None
    reply = client.wait(ticket, 10.0)
    assert reply is not None
    return reply


@pytest.fixture(params=["store", "socket"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    if request.param == "store":
        yield Direct()
        return
    with socket_folder() as folder, LivingNode(folder / "n", ARENA) as living:
        remote = Remote(living)
        yield remote
        remote.close()
        assert living.sound()


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_keeps_apart_what_differs(node: Node, kind: str) -> None:
    """Of the one nothing is found for the other but what they share; then both are held, each with its bytes.
    The memory is small, so that most of what was stored before has been evicted."""
    for seed in range(CASES[node.through]):
        one, other, differs = pair(seed, kind)
        mine, theirs = one.named(), other.named()
        assert node.save(mine) == node.match(mine) == mine.blocks
        assert node.match(theirs) == differs
        assert node.load(theirs) == own(mine, differs)
        assert node.save(theirs) == theirs.blocks
        shared = own(mine, differs)
        assert node.load(mine) == own(mine, mine.blocks)
        assert node.load(theirs) == shared + own(theirs, theirs.blocks)[differs:]


def test_a_forged_key_is_a_miss_and_overwrites_nothing(node: Node) -> None:
    """Equal keys, so equal places, of two texts: whoever came first is found, by his own proofs alone."""
    for seed in range(3 * CASES[node.through]):
        true, false, first = forged(seed)
        mine, theirs = (true, false) if seed % 2 else (false, true)
        assert node.save(mine) == mine.blocks
        assert node.match(theirs) == first
        assert len(node.load(theirs)) == first
        node.save(theirs)
        assert node.load(mine) == own(mine, mine.blocks)
        found = node.load(theirs)
        assert found[first:] == own(theirs, len(found))[first:]
        assert found[:first] == own(mine, first)
