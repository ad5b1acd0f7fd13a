"""Prompts as trees of records: who has children, and the leaves in the order in which they may go."""

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from policies.eviction.base import Item

_SLACK = 64


class Node:
    """One record. ``parent`` may be gone; ``children`` counts those that are held."""

    __slots__ = ("bytes", "children", "gone", "name", "parent", "record")

    def __init__(self, item: Item) -> None:
        self.record, self.name, self.bytes = item.record, item.name, item.bytes
        self.parent: Node | None = None
        self.children = 0
        self.gone = False


AnyNode = TypeVar("AnyNode", bound=Node)


class Tree(Generic[AnyNode]):
    """All records by number."""

    def __init__(self) -> None:
        self.nodes: dict[int, AnyNode] = {}

    def add(self, node: AnyNode, parent: int) -> AnyNode | None:
        """Its parent, where that is held and was a leaf until now."""
        assert node.record not in self.nodes, "added twice"
        self.nodes[node.record] = node
        above = self.nodes.get(parent)
        if above is None:
            return None
        node.parent = above
        above.children += 1
        return above if above.children == 1 else None

    def remove(self, record: int) -> tuple[AnyNode, AnyNode | None]:
        """The node, and its parent where that is a leaf now. Its children are roots from now on."""
        node = self.nodes.pop(record)
        node.gone = True
        above = node.parent
        if above is None or above.gone:
            return node, None
        above.children -= 1
        return node, self.nodes[above.record] if not above.children else None

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        counts = dict.fromkeys(self.nodes, 0)
        for node in self.nodes.values():
            if node.parent is not None and not node.parent.gone:
                counts[node.parent.record] += 1
        assert all(node.children == counts[record] for record, node in self.nodes.items())


class RankedNode(Node):
    """``rank`` orders leaves, lowest first; ``cost`` and ``stamp`` are what a rank is made of."""

    __slots__ = ("cost", "rank", "stamp")

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        self.rank = self.cost = 0.0
        self.stamp = 0


class Leaves:
    """The leaves of a tree by rank. Entries of the heap that no longer say what is so are dropped when met,
    and all at once when there are too many."""

    def __init__(self, tree: Tree[RankedNode]) -> None:
        self._tree = tree
        self._heap: list[tuple[float, int, int]] = []

    def put(self, node: RankedNode) -> None:
        """It is a leaf with this rank."""
        heapq.heappush(self._heap, (node.rank, node.stamp, node.record))
        if len(self._heap) > 2 * len(self._tree.nodes) + _SLACK:
            leaves = (node for node in self._tree.nodes.values() if not node.children)
            self._heap = [(node.rank, node.stamp, node.record) for node in leaves]
            heapq.heapify(self._heap)

    def lowest(self, held: Callable[[int], bool]) -> Iterator[RankedNode]:
        """Leaves from the lowest rank on, new leaves too; ``held`` ones are passed over."""
        passed: list[tuple[float, int, int]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                node = self._tree.nodes.get(entry[2])
                if node is None or node.children or (node.rank, node.stamp) != entry[:2]:
                    continue
                passed.append(entry)
                if not held(node.record):
                    yield node
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)
