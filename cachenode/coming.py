"""What is being written: reserved space, block by block, until it is committed or given up."""

from typing import Literal

import msgspec

from cacheindex.keys import KEY_BYTES
from cachenode.arena import Passage
from cachenode.record import PROOF_BYTES


class Reservation(msgspec.Struct):
    """One record to be. ``before``: the place of the block before its first, b"" at a prompt's start.
    ``parent``: entry and generation of a record found to hold that block, (-1, 0) where none was.
    ``size``: its bytes."""

    number: int
    realm: int
    first: int
    places: bytes
    proofs: bytes
    passages: list[Passage]
    size: int
    before: bytes
    parent: tuple[int, int]
    unwanted: bool = False
    """Forgotten before it was written: it is freed instead of kept."""

    @property
    def blocks(self) -> int:
        return len(self.places) // KEY_BYTES


class Coming:
    """The reservations of all live sessions by block. No block is in two of them."""

    def __init__(self) -> None:
        self._by_place: dict[bytes, tuple[Reservation, int]] = {}

    def add(self, reservation: Reservation) -> None:
        for index, place in enumerate(_places(reservation)):
            assert place not in self._by_place, "reserved twice"
            self._by_place[place] = (reservation, index)

    def remove(self, reservation: Reservation) -> None:
        for place in _places(reservation):
            del self._by_place[place]

    def state(self, place: bytes, proof: bytes) -> Literal["", "coming", "other"]:
        """Whether this block is being written; ``other``: its place is, with another proof."""
        found = self._by_place.get(place)
        if found is None:
            return ""
        reservation, index = found
        same = reservation.proofs[PROOF_BYTES * index : PROOF_BYTES * (index + 1)] == proof
        return "coming" if same else "other"

    def at(self, place: bytes) -> Reservation | None:
        """Who writes the block of this place."""
        found = self._by_place.get(place)
        return found[0] if found else None

    def __len__(self) -> int:
        return len(self._by_place)


def _places(reservation: Reservation) -> list[bytes]:
    packed = reservation.places
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
