"""Who may read and write the node's memory: sessions, their reservations and leases.

One thread owns a store; nothing in it waits or does I/O. Bytes are moved by its users inside what it granted.
At every moment ``free + used + leased + reserved + quarantined = total`` (``figures``).
"""

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Passage, Space
from cachenode.coming import Coming, Reservation
from cachenode.directory import Directory
from cachenode.holdings import Holdings, Sink
from cachenode.record import Layout, moved
from cachenode.walk import Part, Walk, spans
from cachenode.wire import Grant, Lease, Mode, Piece, Read, Reserve, Write
from policies.eviction.base import Eviction

_ORPHAN = "what comes before these blocks is not held"
"""Nobody could find them."""


class Figures(msgspec.Struct, frozen=True):
    """Bytes of the arena by what they are, in whole units, and how many records and blocks can be found.
    ``reservations`` and ``leases`` are open ones of live sessions. ``counters`` only grow."""

    total: int
    free: int
    used: int
    leased: int
    reserved: int
    quarantined: int
    records: int
    blocks: int
    reservations: int
    leases: int
    pinned: int
    counters: dict[str, int]


class _Session(msgspec.Struct):
    layout: Layout
    fingerprint: str
    mode: Mode
    reservations: dict[int, Reservation] = msgspec.field(default_factory=dict)
    leases: dict[int, list[Piece]] = msgspec.field(default_factory=dict)
    lost: bool = False


class Store:
    """``space`` is the arena's, ``directory`` empty. Sessions are opened, may be lost, and end settled:
    ``lost`` says that nothing will be heard of it any more, ``settled`` that nobody copies for it either."""

    def __init__(self, space: Space, directory: Directory, eviction: Eviction, sink: Sink) -> None:
        self._space = space
        self._holdings = Holdings(space, directory, eviction, sink)
        self._directory = directory
        self._coming = Coming()
        self._sessions: dict[str, _Session] = {}
        self._reserved = self._quarantined = 0
        self._number = 0
        self._counters = self._holdings.counters

    # ---- sessions ----

    def open(self, session: str, layout: Layout, mode: Mode) -> str:
        """Begins a session; the layout's fingerprint. Raises ValueError for a name in use."""
        if session in self._sessions:
            raise ValueError("this session is open already")
        self._sessions[session] = _Session(layout, layout.fingerprint(), mode)
        return self._sessions[session].fingerprint

    def lost(self, session: str) -> None:
        """Its owner is gone. What it may still be copying is quarantined; in copy mode there is nothing."""
        known = self._sessions[session]
        if not known.lost:
            self._lose(known)
            if known.mode == "copy":
                self.settled(session)

    def _lose(self, known: _Session) -> None:
        known.lost = True
        for reservation in known.reservations.values():
            self._coming.remove(reservation)
            self._reserved -= self._space.rounded(reservation.size)
            self._quarantined += self._space.rounded(reservation.size)
        for pieces in known.leases.values():
            for piece in pieces:
                self._holdings.lose(piece.slot)

    def settled(self, session: str) -> None:
        """Nobody copies for it any more. Ends it; again is a no-op."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        if not known.lost:
            self._lose(known)
        for reservation in known.reservations.values():
            self._quarantined -= self._space.rounded(reservation.size)
            self._space.free(reservation.passages)
            self._holdings.expect(reservation, -1)
        for pieces in known.leases.values():
            for piece in pieces:
                self._holdings.give_back(piece.slot, lost=True)

    # ---- storing ----

    def reserve(self, session: str, ask: Reserve) -> tuple[list[Grant], int, str]:
        """Grants, how many wanted blocks are admitted, and why not all (see ``wire.Reserved``)."""
        known = self._sessions[session]
        number = self._holdings.realm(known.layout, known.fingerprint, ask.adapter)
        mask = self._holdings.realms[number].mask
        walk = Walk(ask, moved(ask.keys, mask), moved(ask.parent, mask))
        ancestor = self._ancestor(walk.before)
        if ancestor >= 0:
            walk.protected.add(ancestor)
            if self._coming.at(walk.before) is None:
                walk.parent = (ancestor, self._directory.generation(ancestor))
        elif walk.before and self._coming.at(walk.before) is None:
            walk.why = _ORPHAN
        grants: list[Grant] = []
        while walk.at < walk.total and not walk.why:
            found = self._directory.at(walk.places, ask.proofs, walk.at)
            state = self._coming.state(walk.place(walk.at), walk.proof(walk.at))
            if found.blocks:
                walk.passed(found.slot, found.generation, found.blocks)
            elif state == "other" or found.slot >= 0:
                self._counters["conflicts"] += 1
                walk.why = "another text has the same key"
            elif state == "coming":
                walk.skip(1)
            elif walk.at < ask.skip:
                walk.why = _ORPHAN
            else:
                self._grant(known, number, walk, grants)
        return grants, max(0, walk.at - ask.skip), walk.why

    def _grant(self, known: _Session, realm: int, walk: Walk, grants: list[Grant]) -> None:
        """A run of missing blocks, or of it what fits."""
        chunk, first = known.layout.chunk_blocks, walk.ask.first + walk.at
        most = min(walk.total - walk.at, chunk - first % chunk)
        wanted = 1
        while wanted < most and self._missing(walk.place(walk.at + wanted)):
            wanted += 1
        blocks = self._holdings.room(known.layout.record_bytes(1), wanted, walk.protected)
        if blocks < wanted:
            walk.why = f"memory is full: of {wanted} blocks {blocks} fit"
            self._counters["refused_blocks"] += walk.total - walk.at - blocks
        if not blocks:
            return
        size = known.layout.record_bytes(blocks)
        passages = self._space.allocate(size)
        assert passages is not None
        self._number += 1
        places, proofs = walk.cut(blocks)
        reservation = Reservation(
            number=self._number,
            realm=realm,
            first=first,
            places=places,
            proofs=proofs,
            passages=passages,
            size=size,
            before=walk.last,
            parent=walk.parent,
        )
        self._coming.add(reservation)
        self._holdings.expect(reservation, 1)
        self._reserved += self._space.rounded(size)
        known.reservations[self._number] = reservation
        grants.append(Grant(self._number, first, blocks, passages))
        walk.skip(blocks)

    def commit(self, session: str, numbers: list[int]) -> int:
        """Makes records of these reservations; how many of them were open."""
        opened = self._end(session, numbers)
        for reservation in opened:
            if reservation.unwanted or not self._holdings.keep(reservation):
                self._space.free(reservation.passages)
            self._holdings.expect(reservation, -1)
        return len(opened)

    def abort(self, session: str, numbers: list[int]) -> int:
        """Frees reservations that nobody writes any more; how many were open."""
        opened = self._end(session, numbers)
        for reservation in opened:
            self._space.free(reservation.passages)
            self._holdings.expect(reservation, -1)
        self._counters["aborted_records"] += len(opened)
        return len(opened)

    def _end(self, session: str, numbers: list[int]) -> list[Reservation]:
        known = self._sessions[session]
        opened = []
        for number in numbers if not known.lost else ():
            reservation = known.reservations.pop(number, None)
            if reservation is not None:
                self._coming.remove(reservation)
                self._reserved -= self._space.rounded(reservation.size)
                opened.append(reservation)
        return opened

    def _ancestor(self, place: bytes) -> int:
        """The nearest record at or before the block of this place, or -1. What lies between is being written
        and cannot go anyway."""
        while place:
            coming = self._coming.at(place)
            if coming is None:
                return self._directory.ending(place)
            slot, generation = coming.parent
            if slot >= 0 and self._directory.generation(slot) == generation:
                return slot
            place = coming.before
        return -1

    def _missing(self, place: bytes) -> bool:
        return not self._directory.begins(place) and self._coming.at(place) is None

    # ---- loading ----

    def lease(self, session: str, ask: Lease) -> tuple[int, int, list[Piece]]:
        """Number, wanted blocks that may be read, and where they lie (see ``wire.Leased``)."""
        known = self._sessions[session]
        number = self._holdings.realm(known.layout, known.fingerprint, ask.adapter)
        places = moved(ask.keys, self._holdings.realms[number].mask)
        at, total, pieces = 0, len(places) // KEY_BYTES, list[Piece]()
        while at < total:
            found = self._directory.at(places, ask.proofs, at)
            if found.blocks:
                start = max(0, ask.skip - at)
                if start < found.blocks:
                    first = ask.first + at + start
                    pieces.append(self._holdings.lend(found.slot, first, found.blocks - start, start))
                at += found.blocks
            elif at < ask.skip:
                at += 1
            else:
                break
        blocks = max(0, at - ask.skip)
        self._counters["asked_blocks"] += total - ask.skip
        self._counters["leased_blocks"] += blocks
        self._counters["leased_bytes"] += blocks * known.layout.record_bytes(1)
        if not pieces:
            return 0, 0, []
        self._number += 1
        known.leases[self._number] = pieces
        return self._number, blocks, pieces

    def release(self, session: str, numbers: list[int]) -> int:
        """Ends leases that nobody copies from any more; how many were open."""
        known = self._sessions[session]
        count = 0
        for number in numbers if not known.lost else ():
            pieces = known.leases.pop(number, None)
            for piece in pieces or ():
                self._holdings.give_back(piece.slot)
            count += pieces is not None
        return count

    # ---- copies through the socket ----

    def target(self, session: str, ask: Write) -> list[Passage]:
        """Where its bytes go in the arena; [] for what is not open or out of bounds."""
        known = self._sessions[session]
        found = known.reservations.get(ask.reservation)
        if found is None or known.lost:
            return []
        part = Part(ask.rank, ask.offset, len(ask.data))
        return spans(known.layout, found.passages, found.blocks, part)

    def source(self, session: str, ask: Read) -> list[Passage]:
        """The same for bytes of a leased piece; its offset counts from the first leased block."""
        known = self._sessions[session]
        pieces = known.leases.get(ask.lease, [])
        if known.lost or not 0 <= ask.piece < len(pieces):
            return []
        found, size = pieces[ask.piece], known.layout.block_bytes
        if ask.offset < 0 or ask.offset + ask.length > found.blocks * size:
            return []
        part = Part(ask.rank, found.start * size + ask.offset, ask.length)
        return spans(known.layout, found.passages, found.of, part)

    # ---- for operators ----

    def open_reservations(self, session: str) -> int:
        return len(self._sessions[session].reservations)

    def open_leases(self, session: str) -> int:
        return len(self._sessions[session].leases)

    def forget(self, session: str) -> int:
        """Drops all that is held in its layout, in slices of ``work``; how many records there are."""
        return self.clear(self._sessions[session].fingerprint)

    def clear(self, fingerprint: str | None = None) -> int:
        """The same for a layout by its fingerprint, or for all. What is being written is not kept either."""
        for session in self._sessions.values():
            for reservation in session.reservations.values():
                if fingerprint in (None, self._holdings.realms[reservation.realm].fingerprint):
                    reservation.unwanted = True
        return self._holdings.clear(fingerprint)

    def work(self) -> bool:
        """A slice of what was put off; whether there is more."""
        return self._holdings.work()

    def pin(self, fingerprint: str, keys: bytes, adapter: str = "") -> int:
        """Keeps the records of this prefix, named by the keys of its engine blocks from the start on, until
        they are unpinned as often; how many of its leading blocks that are."""
        return self._holdings.pin(fingerprint, keys, adapter, 1)

    def unpin(self, fingerprint: str, keys: bytes, adapter: str = "") -> int:
        """Takes one pin back; how many leading blocks had one."""
        return self._holdings.pin(fingerprint, keys, adapter, -1)

    def held(self) -> Iterator[tuple[str, int, bytes]]:
        """All records that can be found: fingerprint, tokens a block, keys. There may be changes between
        two of them."""
        return self._holdings.held()

    @property
    def used_bytes(self) -> int:
        """Of all that is not free."""
        return self._space.total_bytes - self._space.free_bytes

    def figures(self) -> Figures:
        kept, live = self._holdings.records.held, [one for one in self._sessions.values() if not one.lost]
        return Figures(
            total=self._space.total_bytes,
            free=self._space.free_bytes,
            used=kept.used,
            leased=kept.leased,
            reserved=self._reserved,
            quarantined=self._quarantined + kept.quarantined,
            records=self._directory.records,
            blocks=self._holdings.blocks,
            reservations=sum(len(one.reservations) for one in live),
            leases=sum(len(one.leases) for one in live),
            pinned=self._holdings.records.pinned,
            counters=dict(self._counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        self._holdings.check_integrity()
        now = self.figures()
        assert now.free + now.used + now.leased + now.reserved + now.quarantined == now.total, now
        taken = [one.passages for known in self._sessions.values() for one in known.reservations.values()]
        taken += [self._holdings.records.passages(slot) for slot in self._holdings.records.slots()]
        taken_bytes = sorted(passage for passages in taken for passage in passages)
        for (offset, length), (after, _) in pairwise(taken_bytes):
            assert offset + length <= after, "two records share bytes"
