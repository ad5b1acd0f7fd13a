"""Least recently used first. A loop over a set slightly larger than the memory never hits with it."""

from collections.abc import Callable, Iterator

import msgspec

from policies.eviction.base import Item
from policies.eviction.tree import Leaves, RankedNode, Tree


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It takes none."""


class Lru:
    """The leaf that was added or used longest ago."""

    def __init__(self, params: Params, capacity_bytes: int) -> None:
        self._tree: Tree[RankedNode] = Tree()
        self._leaves = Leaves(self._tree)
        self._now = 0

    def add(self, item: Item) -> None:
        node = RankedNode(item)
        self._tree.add(node, item.parent)
        self._touch(node)

    def use(self, record: int) -> None:
        self._touch(self._tree.nodes[record])

    def _touch(self, node: RankedNode) -> None:
        self._now += 1
        node.rank, node.stamp = float(self._now), self._now
        if not node.children:
            self._leaves.put(node)

    def remove(self, record: int) -> None:
        _, leaf = self._tree.remove(record)
        if leaf is not None:
            self._leaves.put(leaf)

    def victims(self, held: Callable[[int], bool]) -> Iterator[int]:
        return (node.record for node in self._leaves.lowest(held))

    def check_integrity(self) -> None:
        self._tree.check_integrity()
