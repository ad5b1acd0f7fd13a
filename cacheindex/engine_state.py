"""From an engine's own block hashes to our keys: the state kept for one engine in one epoch.

Engines name blocks by hashes that mean nothing elsewhere, refer to parents and removals by them,
and announce every copy. A ``Translator`` resolves them to chain keys, counts copies, and says what
begins and ceases to be held. No I/O, no clock. Bounded: beyond ``max_blocks`` the blocks announced
longest ago are given up, and counted (``given_up``). Salts stay inside and reach nothing but the key.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
from xxhash import xxh3_128_digest

from cacheindex.engine_events import (
    FULL_ATTENTION,
    AllCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    Hash,
)
from cacheindex.events import Cleared, Removed, Stored, Tier
from cacheindex.keys import BLOCK_TOKENS, Chain, Extra, Namespace, pack_tokens

MAX_BLOCKS = 2_000_000
MAX_GROUPS = 64
MAX_CONFLICTS = 8
_MAX_ROOTS = 4096

Place = tuple[Tier, int]


class Change(msgspec.Struct, frozen=True):
    """One of our events and where it belongs; the event's layout is ""."""

    event: Stored | Removed | Cleared
    group: int
    stride: int


class _Group(msgspec.Struct):
    block_size: int
    stride: int
    kind: str | None


class _Node:
    """The prompt up to the end of one engine block. ``name`` is its key, or a name of our own where
    it ends inside a block of ours: then ``pending`` and ``extras`` are what that block has so far,
    ``base`` the key before it. ``parts``: names of the engine blocks in that block up to this one."""

    __slots__ = ("base", "extras", "length", "name", "parts", "pending", "refs")

    def __init__(self, name: bytes, length: int) -> None:
        self.name = self.base = name
        self.length = length
        self.pending = b""
        self.extras: tuple[Extra, ...] = ()
        self.parts: tuple[bytes, ...] = ()
        self.refs = 0


class Translator:
    """``reason`` is "" while the source can be followed; else why it cannot, for people: nothing
    more is translated until a new one is made. ``skipped`` counts what was passed over by cause, in
    the given counter where there is one. ``gpu_only``: nothing was said of other tiers."""

    def __init__(
        self, model: str, secret: bytes, max_blocks: int = MAX_BLOCKS, skipped: Counter[str] | None = None
    ) -> None:
        self.reason = ""
        self.skipped: Counter[str] = Counter() if skipped is None else skipped
        self.gpu_only = True
        self._model, self._secret, self._max_blocks = model, secret, max_blocks
        self._roots: dict[tuple[str, str], bytes] = {}
        self._groups: dict[int, _Group] = {}
        self._nodes: OrderedDict[Hash, _Node] = OrderedDict()
        self._held: dict[Place, dict[bytes, int]] = {}
        # Only for engine blocks smaller than ours: a key's parts, and the keys a part belongs to.
        self._parts: dict[bytes, tuple[bytes, ...]] = {}
        self._ends: dict[bytes, set[bytes]] = {}
        self._conflicts = 0
        self._out: list[tuple[type[Stored] | type[Removed] | type[Cleared], Place, list[bytes]]] = []

    @property
    def block_size(self) -> int | None:
        """The engine's own, the largest of its groups; None before its first block."""
        return max((group.block_size for group in self._groups.values()), default=None)

    @property
    def stride(self) -> int | None:
        return max((group.stride for group in self._groups.values()), default=None)

    @property
    def blocks(self) -> int:
        """Distinct engine blocks remembered."""
        return len(self._nodes)

    def apply(self, batch: EngineBatch) -> list[Change]:
        """What this batch changes, in order. Batches come once each, in the order of their numbers."""
        self.skipped.update(batch.skipped)
        for event in batch.events:
            if self.reason:
                break
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear(event)
        return self._take()

    def check_integrity(self) -> None:
        """Raises AssertionError where this contradicts itself. For tests."""
        copies = sum(sum(held.values()) for held in self._held.values())
        names = {name for held in self._held.values() for name in held}
        for holds, what in (
            (sum(node.refs for node in self._nodes.values()) == copies, "copies of hashes and of names"),
            ({node.name for node in self._nodes.values()} == names, "names held and names known"),
            (all(node.refs > 0 for node in self._nodes.values()), "a hash without a copy"),
            (len(self._nodes) <= self._max_blocks, "more blocks than allowed"),
            (set(self._parts) <= names, "parts of a key that is gone"),
            (all(self._ends.values()), "a part of no key"),
        ):
            if not holds:
                raise AssertionError(f"engine state: wrong {what}")

    # ---- events ----

    def _store(self, event: BlockStored) -> None:
        if event.tier is None:
            self._skip("unknown_medium", len(event.hashes))
        elif not event.tokens:
            self._store_known(event, event.tier)
        elif self._group(event) is not None:
            if len(event.tokens) != len(event.hashes) * event.block_size:
                self._skip("misaligned", len(event.hashes))
                return
            parent = None if event.parent is None else self._nodes.get(event.parent)
            if event.parent is not None and parent is None:
                self._skip("orphan", len(event.hashes))
                return
            try:
                nodes = self._chain(event, parent)
            except ValueError:
                self._skip("bad_event")
                return
            for name, node in zip(event.hashes, nodes, strict=False):
                self._add(name, node, (event.tier, event.group))

    def _store_known(self, event: BlockStored, tier: Tier) -> None:
        """Engines announce blocks in slower tiers by hash alone; those seen before have a name."""
        for name in event.hashes:
            node = self._nodes.get(name)
            if node is None or event.group not in self._groups:
                self._skip("unknown_hash")
            else:
                self._add(name, node, (tier, event.group))

    def _remove(self, event: BlockRemoved) -> None:
        if event.tier is None:
            self._skip("unknown_medium", len(event.hashes))
            return
        place = (event.tier, event.group)
        for name in event.hashes:
            node = self._nodes.get(name)
            if node is None or not self._drop(node, place):
                self._skip("unknown_removal")
                continue
            node.refs -= 1
            if node.refs == 0:
                del self._nodes[name]

    def _clear(self, event: AllCleared) -> None:
        places = [place for place in self._held if event.tier in (None, place[0])]
        for place in places:
            self._say(Cleared, place, ())
        if event.tier is None:
            self._nodes.clear()
            self._held.clear()
            self._parts.clear()
            self._ends.clear()
            return
        gone = [self._held.pop(place) for place in places]
        for name, node in list(self._nodes.items()):
            node.refs -= min(node.refs, sum(held.get(node.name, 0) for held in gone))
            if node.refs == 0:
                del self._nodes[name]
                self._unlink(node.name)

    # ---- groups ----

    def _group(self, event: BlockStored) -> _Group | None:
        """The event's KV group if its blocks can be followed."""
        group = self._groups.get(event.group)
        if group is None:
            group = self._new_group(event)
        elif group.kind is None:
            group.kind = event.kind
        if group is None:
            return None
        if group.kind is not None and group.kind not in FULL_ATTENTION:
            self.reason = f"KV group {event.group} is {group.kind}: its blocks do not name prefixes"
        elif len(self._groups) > 1 and any(other.kind is None for other in self._groups.values()):
            self.reason = "several KV groups, and the engine does not say of which kind"
        elif event.block_size != group.block_size:
            self._skip("other_block_size", len(event.hashes))
            return None
        return None if self.reason else group

    def _new_group(self, event: BlockStored) -> _Group | None:
        size = event.block_size
        if not 0 <= event.group < MAX_GROUPS:
            self._skip("unknown_group", len(event.hashes))
            return None
        if size <= 0 or (size % BLOCK_TOKENS and BLOCK_TOKENS % size):
            self._skip("unusable_block_size", len(event.hashes))
            self.reason = f"engine blocks of {size} tokens neither divide {BLOCK_TOKENS} nor are a multiple"
            return None
        group = _Group(block_size=size, stride=max(size, BLOCK_TOKENS), kind=event.kind)
        self._groups[event.group] = group
        return group

    # ---- names ----

    def _chain(self, event: BlockStored, parent: _Node | None) -> list[_Node]:
        """A node for each block of the event that can be named. Raises ValueError for bad tokens."""
        size, start = event.block_size, parent.length if parent is not None else 0
        if start % size:
            self._skip("misaligned", len(event.hashes))
            return []
        extras, salt, count = self._readable(event, start)
        if parent is None:
            parent = _Node(self._root(event.adapter, salt), 0)
        if size % BLOCK_TOKENS:
            return self._small_blocks(event, parent, extras, count)
        step, chain = size // BLOCK_TOKENS, Chain(parent.name)
        chain.length = parent.length
        keys = chain.extend(event.tokens[: count * size], extras)
        return [
            _Node(keys[step * (index + 1) - 1], parent.length + size * (index + 1)) for index in range(count)
        ]

    def _readable(self, event: BlockStored, start: int) -> tuple[list[Extra], str, int]:
        """The multimodal items that begin in the event's blocks, the salt, and how many of the
        blocks from the first on can be named at all."""
        extras: list[Extra] = []
        salt, size = "", event.block_size
        for index, block in enumerate(event.extras):
            if block is None:
                continue
            at = start + index * size
            if block.opaque or len(block.words) > (1 if at == 0 else 0):
                self._skip("unnameable", len(event.hashes) - index)
                return extras, salt, index
            salt = block.words[0] if block.words else salt
            # An item reaching in from an earlier block has a negative offset: it entered there.
            extras += (Extra(at + offset, name) for name, offset in block.items if 0 <= offset < size)
        return extras, salt, len(event.hashes)

    def _root(self, adapter: str, salt: str) -> bytes:
        root = self._roots.get((adapter, salt))
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = Namespace(self._model, adapter, salt).root(self._secret)
            self._roots[adapter, salt] = root
        return root

    def _small_blocks(
        self, event: BlockStored, parent: _Node, extras: Sequence[Extra], count: int
    ) -> list[_Node]:
        size, data, nodes = event.block_size, pack_tokens(event.tokens), list[_Node]()
        for index in range(count):
            start, end = parent.length, parent.length + size
            pending = parent.pending + data[4 * size * index : 4 * size * (index + 1)]
            inside = parent.extras + tuple(extra for extra in extras if start <= extra.offset < end)
            if end % BLOCK_TOKENS:
                node = _Node(_part_name(parent.base, pending, inside), end)
                node.base, node.pending, node.extras = parent.base, pending, inside
                node.parts = (*parent.parts, node.name)
            else:
                chain = Chain(parent.base)
                chain.length = end - BLOCK_TOKENS
                chain.pending = pending
                node = _Node(chain.extend((), inside)[0], end)
                if parent.parts:
                    self._link(node.name, parent.parts)
            nodes.append(node)
            parent = node
        return nodes

    # ---- who holds what ----

    def _add(self, name: Hash, node: _Node, place: Place) -> None:
        known = self._nodes.get(name)
        if known is None:
            self._nodes[name] = known = node
            if len(self._nodes) > self._max_blocks:
                self._give_up()
        elif known.name != node.name:
            self._unlink(node.name)
            self._conflict()
            return
        else:
            self._nodes.move_to_end(name)
        known.refs += 1
        self.gpu_only = self.gpu_only and place[0] == "gpu"
        held = self._held.setdefault(place, {})
        held[known.name] = copies = held.get(known.name, 0) + 1
        if copies == 1:
            self._say(Stored, place, self._complete(known, place))

    def _drop(self, node: _Node, place: Place) -> bool:
        held = self._held.get(place)
        copies = held.get(node.name, 0) if held is not None else 0
        if held is None or not copies:
            return False
        if copies > 1:
            held[node.name] = copies - 1
            return True
        self._say(Removed, place, self._complete(node, place))
        del held[node.name]
        self._unlink(node.name)
        return True

    def _complete(self, node: _Node, place: Place) -> list[bytes]:
        """The keys that ``place`` holds whole now and would not without this node."""
        if self._groups[place[1]].block_size >= BLOCK_TOKENS:
            return [node.name]
        keys, held = self._ends.get(node.name, ()) if node.parts else (node.name,), self._held[place]
        return [key for key in keys if key in held and all(part in held for part in self._parts[key])]

    def _link(self, key: bytes, parts: tuple[bytes, ...]) -> None:
        self._parts[key] = parts
        for part in parts:
            self._ends.setdefault(part, set()).add(key)

    def _unlink(self, name: bytes) -> None:
        """Forget a key's parts once nobody holds it."""
        if name not in self._parts or any(name in held for held in self._held.values()):
            return
        for part in self._parts.pop(name):
            keys = self._ends[part]
            keys.discard(name)
            if not keys:
                del self._ends[part]

    def _give_up(self) -> None:
        name, node = next(iter(self._nodes.items()))
        self._skip("given_up")
        for place in list(self._held):
            while node.refs and self._drop(node, place):
                node.refs -= 1
        del self._nodes[name]

    def _conflict(self) -> None:
        self._skip("hash_conflict")
        self._conflicts += 1
        if self._conflicts >= MAX_CONFLICTS:
            self.reason = "the engine's block hashes do not name prefixes"

    # ---- output ----

    def _skip(self, cause: str, count: int = 1) -> None:
        self.skipped[cause] += count

    def _say(
        self, kind: type[Stored] | type[Removed] | type[Cleared], place: Place, keys: Iterable[bytes]
    ) -> None:
        if self._out and self._out[-1][0] is kind and self._out[-1][1] == place:
            self._out[-1][2].extend(keys)
        else:
            self._out.append((kind, place, list(keys)))

    def _take(self) -> list[Change]:
        out, self._out = self._out, []
        changes: list[Change] = []
        for kind, (tier, group), keys in out:
            event: Stored | Removed | Cleared
            if kind is Cleared:
                event = Cleared(tier=tier, layout="")
            elif keys:
                event = (Stored if kind is Stored else Removed)(tier=tier, layout="", keys=b"".join(keys))
            else:
                continue
            known = self._groups.get(group)
            if known is not None:
                changes.append(Change(event=event, group=group, stride=known.stride))
        return changes


def _part_name(base: bytes, pending: bytes, extras: tuple[Extra, ...]) -> bytes:
    return xxh3_128_digest(b"part" + base + pending + repr(extras).encode("utf-8", "surrogatepass"))
