"""The contract of an eviction policy: what it hears, and the order in which it lets records go."""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec


class Item(msgspec.Struct, frozen=True):
    """A record as far as a decision may depend on it.

    ``record`` is its number while it is held, ``name`` (its first place) its identity over time,
    ``parent`` the record before it in its prompt, -1 for none that is held. ``bytes`` is its size,
    ``first_token`` its place in the prompt, ``tokens`` its length.
    """

    record: int
    name: bytes
    parent: int
    bytes: int
    first_token: int
    tokens: int


class Eviction(Protocol):
    """Deterministic; no clock. ``victims`` names records in the order to evict, leaves before roots: never
    one that has children. It leaves out those that are ``held``. The caller may ``remove`` what was named
    before it asks for the next. A record that goes without being evicted is ``remove``\\d too; its children
    are roots from then on.
    """

    def add(self, item: Item) -> None: ...

    def use(self, record: int) -> None:
        """It was read. Readers use a prompt's records from its start on, one after the other."""
        ...

    def remove(self, record: int) -> None: ...

    def victims(self, held: Callable[[int], bool]) -> Iterator[int]: ...

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        ...
