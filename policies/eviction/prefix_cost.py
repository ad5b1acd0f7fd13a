"""Cheapest recomputation per byte first, aged: GreedyDual-Size (Cao and Irani, 1997) over a tree of records.

What a record costs to compute again grows with its place in the prompt, since each of its tokens attends
to all before it: ``tokens * (1 + position / attention_tokens)`` in units of one token's own work. A record's
rank is that cost per byte plus the rank of what was evicted last when it was used last: so what is never used
goes in time, however dear it was.
"""

from collections.abc import Callable, Iterator

import msgspec

from policies.eviction.base import Item
from policies.eviction.tree import Leaves, RankedNode, Tree


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``attention_tokens``: at this place in a prompt a token costs twice what the first one costs."""

    attention_tokens: float = 8192.0


class PrefixCost:
    """See the module."""

    def __init__(self, params: Params, capacity_bytes: int) -> None:
        self._attention = max(1.0, params.attention_tokens)
        self._tree: Tree[RankedNode] = Tree()
        self._leaves = Leaves(self._tree)
        self._age = 0.0
        self._now = 0

    def add(self, item: Item) -> None:
        node = RankedNode(item)
        middle = item.first_token + item.tokens / 2
        node.cost = item.tokens * (1 + middle / self._attention) / max(1, item.bytes)
        self._tree.add(node, item.parent)
        self._touch(node)

    def use(self, record: int) -> None:
        self._touch(self._tree.nodes[record])

    def _touch(self, node: RankedNode) -> None:
        self._now += 1
        node.rank, node.stamp = self._age + node.cost, self._now
        if not node.children:
            self._leaves.put(node)

    def remove(self, record: int) -> None:
        _, leaf = self._tree.remove(record)
        if leaf is not None:
            self._leaves.put(leaf)

    def victims(self, held: Callable[[int], bool]) -> Iterator[int]:
        for node in self._leaves.lowest(held):
            self._age = max(self._age, node.rank)
            yield node.record

    def check_integrity(self) -> None:
        self._tree.check_integrity()
