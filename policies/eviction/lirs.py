"""LIRS (Jiang and Zhang, 2002) over a tree of records of different sizes: resists scans and loops.

Most of the memory belongs to *hot* records: those whose last two uses lie closest together. The rest is a
probation: what comes in new must be used again while the *stack* still remembers it before it counts as
hot, and goes first until then. The stack holds records by their last use, down to the hot one that was
used longest ago; those of them that were evicted are remembered by name (*ghosts*). A loop over a set
slightly larger than the memory so keeps most of it, where LRU keeps nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from policies.eviction.base import Item
from policies.eviction.tree import Node, Tree


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``probation``: the share of the memory for records that are not known to be hot."""

    probation: float = 0.03


class _Node(Node):
    """``above`` and ``below`` are its neighbours in the stack, None outside it."""

    __slots__ = ("above", "below", "hot")

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        self.above: _Node | None = None
        self.below: _Node | None = None
        self.hot = False


_BOTTOM = Item(-1, b"", -1, 0, 0, 0)


class Lirs:
    """See the module. Ghosts stand for at most as many bytes as the memory has."""

    def __init__(self, params: Params, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._hot_limit = int(capacity_bytes * (1 - min(max(params.probation, 0.0), 1.0)))
        self._hot_bytes = self._ghost_bytes = 0
        self._tree: Tree[_Node] = Tree()
        self._end = _Node(_BOTTOM)  # Between the top and the bottom of the stack, a ring.
        self._end.above = self._end.below = self._end
        self._probation: OrderedDict[int, _Node] = OrderedDict()  # Leaves only, the next to go first.
        self._ghosts: OrderedDict[bytes, _Node] = OrderedDict()

    # ---- what it hears ----

    def add(self, item: Item) -> None:
        node = _Node(item)
        parent = self._tree.add(node, item.parent)
        if parent is not None:
            self._probation.pop(parent.record, None)
        ghost = self._ghosts.get(item.name)
        if ghost is not None:
            self._forget(ghost)
        self._push(node)
        if ghost is not None or self._hot_bytes + node.bytes <= self._hot_limit:
            self._warm(node)
        else:
            self._probation[node.record] = node

    def use(self, record: int) -> None:
        node = self._tree.nodes[record]
        remembered = node.above is not None
        if remembered:
            self._pull(node)
        self._push(node)
        if node.hot:
            self._prune()
        elif remembered:
            self._probation.pop(record, None)
            self._warm(node)
        elif not node.children:
            self._probation[record] = node
            self._probation.move_to_end(record)

    def remove(self, record: int) -> None:
        node, leaf = self._tree.remove(record)
        self._probation.pop(record, None)
        if leaf is not None and not leaf.hot:
            self._probation[leaf.record] = leaf
            self._probation.move_to_end(leaf.record, last=False)
        if node.hot:
            self._hot_bytes -= node.bytes
            node.hot = False
        node.parent = None
        if node.above is not None:
            known = self._ghosts.pop(node.name, None)
            if known is not None:
                self._drop_ghost(known)
            self._ghosts[node.name] = node
            self._ghost_bytes += node.bytes
        self._prune()
        while self._ghost_bytes > self._capacity:
            self._forget(next(iter(self._ghosts.values())))

    def victims(self, held: Callable[[int], bool]) -> Iterator[int]:
        """Those on probation, then hot ones, used longest ago first; parents when they are leaves."""
        named: set[int] = set()
        went = True
        while went:
            went = False
            for record in self._on_probation(named):
                named.add(record)
                if not held(record):
                    went = True
                    yield record
            for record in self._in_the_stack(named):
                named.add(record)
                if not held(record):
                    went = True
                    yield record

    def _on_probation(self, named: set[int]) -> Iterator[int]:
        """Those not named yet, the first to go first, also while that changes."""
        while self._probation:
            first = next(iter(self._probation))
            if first in named:
                first = next((record for record in self._probation if record not in named), -1)
            if first < 0:
                return
            yield first

    def _in_the_stack(self, named: set[int]) -> Iterator[int]:
        """Leaves not named yet, from the bottom up, also while that changes."""
        node = self._end.above
        while node is not None and node is not self._end:
            after = node.above
            if self._leaf(node) and node.record not in named:
                yield node.record
                if after is not None and after.above is None:
                    after = self._end.above
            node = after

    @staticmethod
    def _leaf(node: _Node) -> bool:
        return not node.gone and not node.children

    # ---- the stack ----

    def _upwards(self) -> Iterator[_Node]:
        node = self._end.above
        while node is not None and node is not self._end:
            yield node
            node = node.above

    def _push(self, node: _Node) -> None:
        """On top: below the end of the ring."""
        top = self._end.below
        assert top is not None
        node.below, node.above = top, self._end
        top.above = self._end.below = node

    def _pull(self, node: _Node) -> None:
        above, below = node.above, node.below
        assert above is not None
        assert below is not None
        above.below, below.above = below, above
        node.above = node.below = None

    def _warm(self, node: _Node) -> None:
        """It is hot; the hot ones used longest ago give way."""
        node.hot = True
        self._hot_bytes += node.bytes
        while self._hot_bytes > self._hot_limit:
            self._prune()
            bottom = self._end.above
            assert bottom is not None
            if bottom is node or bottom is self._end:
                break
            bottom.hot = False
            self._hot_bytes -= bottom.bytes
            self._pull(bottom)
            if not bottom.children:
                self._probation[bottom.record] = bottom
        self._prune()

    def _prune(self) -> None:
        """The stack ends with a hot record: what lies deeper was used longer ago than any hot one."""
        while True:
            bottom = self._end.above
            assert bottom is not None
            if bottom is self._end or bottom.hot:
                return
            self._forget(bottom)

    def _forget(self, node: _Node) -> None:
        """Out of the stack; a ghost is gone with that."""
        self._pull(node)
        if node.gone and self._ghosts.get(node.name) is node:
            del self._ghosts[node.name]
            self._ghost_bytes -= node.bytes

    def _drop_ghost(self, ghost: _Node) -> None:
        self._pull(ghost)
        self._ghost_bytes -= ghost.bytes

    def check_integrity(self) -> None:
        self._tree.check_integrity()
        stack = list(self._upwards())
        hot = [node for node in self._tree.nodes.values() if node.hot]
        assert not stack or stack[0].hot
        assert {node.record for node in hot} <= {node.record for node in stack if not node.gone}
        assert self._hot_bytes == sum(node.bytes for node in hot)
        assert {node.name for node in stack if node.gone} == set(self._ghosts)
        assert self._ghost_bytes == sum(node.bytes for node in self._ghosts.values()) <= self._capacity
        cold = {r for r, node in self._tree.nodes.items() if not node.hot and not node.children}
        assert cold == set(self._probation)
