"""A paged KV block cache with vLLM's habits, without KV.

Full blocks only are cached, under a chained hash that includes adapter and salt. Equal content in
two physical blocks stays two copies, and the removal of each is announced. At most
``floor((n-1)/B)*B`` tokens of a prompt are served from cache, so the last block of a fully cached
prompt is computed again into a fresh block. Freed blocks stay usable until they are taken; a
request's tail is taken before its head, and blocks without a hash before all others.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Space(NamedTuple):
    """What must agree besides tokens for cached KV to be shared: LoRA adapter name, cache salt."""

    adapter: str = ""
    salt: str = ""


NO_SPACE = Space()


class Stored(NamedTuple):
    """Consecutive full blocks became usable. ``tokens`` covers exactly these blocks; ``first`` is
    the index of the first one in its request (0 means there is no parent)."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    space: Space
    first: int


class Removed(NamedTuple):
    """One physical copy of a block is gone."""

    hash: bytes


class Cleared(NamedTuple):
    """All blocks are gone."""


CacheEvent = Stored | Removed | Cleared


class TooLarge(ValueError):
    """The request needs more blocks than the pool has at all."""


class Allocation:
    """A running request's tokens and the blocks it holds. Made by ``BlockCache.open`` only."""

    __slots__ = ("blocks", "cached_tokens", "computed", "hashes", "promised", "space", "tokens")

    def __init__(self, tokens: list[int], space: Space, hashes: list[bytes]) -> None:
        self.tokens = tokens
        self.space = space
        self.hashes = hashes  # of all full blocks of ``tokens`` so far
        self.blocks: list[int] = []
        self.cached_tokens = 0  # tokens served from cache when the request was admitted
        self.computed = 0  # full blocks of ours that are in the cache
        self.promised = 0  # blocks set aside for this request but not taken yet


class BlockCache:
    """The pool. Not thread-safe: one loop owns it.

    ``blocks`` counts the null block, as vLLM's ``--num-gpu-blocks-override`` does: ``blocks - 1``
    can be used. Events collect until ``take_events``.
    """

    def __init__(self, blocks: int, block_size: int, seed: str = "") -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError("a cache needs at least 2 blocks (one is the null block) of at least 1 token")
        self.block_size = block_size
        self.capacity = blocks - 1
        self._root = hashlib.sha256(seed.encode()).digest()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._refs: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._copies: dict[bytes, dict[int, None]] = {}
        self._content: dict[bytes, tuple[Space, list[int], int]] = {}
        self._promised = 0
        self._events: list[CacheEvent] = []

    # -- a request's life -----------------------------------------------------------------------

    def open(self, prompt: Sequence[int], space: Space, max_output: int) -> Allocation | None:
        """Admit a prompt: take its cached blocks, allocate the others, set blocks aside for the
        output. None when there is no room now; raises TooLarge when there never will be."""
        held = Allocation(list(prompt), space, self._chain(prompt, space))
        total = -(-(len(prompt) + max_output) // self.block_size)
        if total > self.capacity:
            raise TooLarge(f"{total} blocks are needed, the pool has {self.capacity}")
        hits = self._hits(held)
        idle = sum(1 for block in hits if block in self._free)
        fresh = -(-len(prompt) // self.block_size) - len(hits)
        if len(self._free) - idle - self._promised < total - len(hits):
            return None
        for block in hits:
            self._free.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        held.blocks = hits
        held.computed = len(hits)
        held.cached_tokens = len(hits) * self.block_size
        held.promised = total - len(hits) - fresh
        self._promised += held.promised
        held.blocks.extend(self._take() for _ in range(fresh))
        return held

    def computed_prompt(self, held: Allocation) -> None:
        """The prompt's prefill is done: its full blocks can be hit from now on."""
        self._cache_full(held, len(held.tokens))

    def append(self, held: Allocation, token: int) -> None:
        """One more output token. Its own KV exists only after the next step, as in vLLM: a block
        becomes usable once the token after it was sampled."""
        if len(held.tokens) > len(held.blocks) * self.block_size:
            held.promised -= 1
            self._promised -= 1
            held.blocks.append(self._take())
        self._cache_full(held, len(held.tokens))
        held.tokens.append(token)
        if len(held.tokens) % self.block_size == 0:
            self._extend_chain(held.hashes, held.tokens, held.space)

    def free(self, held: Allocation) -> None:
        """The request ended (or was aborted). Its blocks stay usable until they are taken."""
        self._promised -= held.promised
        held.promised = 0
        hashed: list[int] = []
        plain: list[int] = []
        for block in reversed(held.blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                (hashed if block in self._hash_of else plain).append(block)
        held.blocks = []
        for block in reversed(plain):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        for block in hashed:
            self._free[block] = None

    def reset(self) -> bool:
        """Forget everything. False, and nothing happens, while a request holds blocks."""
        if self._refs:
            return False
        self._hash_of.clear()
        self._copies.clear()
        self._content.clear()
        self._events.append(Cleared())
        return True

    # -- what others ask ------------------------------------------------------------------------

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def held(self) -> dict[Space, set[tuple[int, ...]]]:
        """The truth: every token prefix whose last block exists in at least one copy. A block is
        listed even when an earlier block of its prefix is gone."""
        truth: dict[Space, set[tuple[int, ...]]] = {}
        for digest in self._copies:
            space, tokens, end = self._content[digest]
            truth.setdefault(space, set()).add(tuple(tokens[:end]))
        return truth

    def copies(self, tokens: Sequence[int], space: Space = NO_SPACE) -> int:
        """How many physical blocks hold the last full block of ``tokens``."""
        chain = self._chain(tokens, space)
        return len(self._copies.get(chain[-1], ())) if chain else 0

    def match(self, tokens: Sequence[int], space: Space = NO_SPACE) -> int:
        """Tokens a request with this prompt would find cached if it were admitted now."""
        return len(self._hits(Allocation(list(tokens), space, self._chain(tokens, space)))) * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks held by running requests."""
        return 1.0 - len(self._free) / self.capacity

    def check_integrity(self) -> None:
        """Raises AssertionError when the parts contradict each other."""
        assert len(self._free) + len(self._refs) == self.capacity
        assert not self._free.keys() & self._refs.keys()
        assert all(count > 0 for count in self._refs.values())
        assert 0 <= self._promised <= len(self._free)
        pairs = {(digest, block) for digest, blocks in self._copies.items() for block in blocks}
        assert pairs == {(digest, block) for block, digest in self._hash_of.items()}
        assert self._copies.keys() == self._content.keys()

    # -- inside ---------------------------------------------------------------------------------

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            copies = self._copies[digest]
            del copies[block]
            if not copies:
                del self._copies[digest], self._content[digest]
            self._events.append(Removed(digest))
        self._refs[block] = 1
        return block

    def _cache_full(self, held: Allocation, length: int) -> None:
        full = length // self.block_size
        if held.computed >= full:
            return
        first = held.computed
        for index in range(first, full):
            digest, block = held.hashes[index], held.blocks[index]
            self._hash_of[block] = digest
            self._copies.setdefault(digest, {})[block] = None
            self._content[digest] = (held.space, held.tokens, (index + 1) * self.block_size)
        held.computed = full
        parent = held.hashes[first - 1] if first else None
        tokens = held.tokens[first * self.block_size : full * self.block_size]
        self._events.append(Stored(held.hashes[first:full], parent, tokens, held.space, first))

    def _hits(self, held: Allocation) -> list[int]:
        hits: list[int] = []
        for digest in held.hashes[: (len(held.tokens) - 1) // self.block_size]:
            copies = self._copies.get(digest)
            if not copies:
                break
            hits.append(next(iter(copies)))
        return hits

    def _chain(self, tokens: Sequence[int], space: Space) -> list[bytes]:
        hashes: list[bytes] = []
        for _ in range(len(tokens) // self.block_size):
            self._extend_chain(hashes, tokens, space)
        return hashes

    def _extend_chain(self, hashes: list[bytes], tokens: Sequence[int], space: Space) -> None:
        start = len(hashes) * self.block_size
        block = array("I", tokens[start : start + self.block_size]).tobytes()
        parent = hashes[-1] if hashes else self._root
        extra = f"{space.adapter}\0{space.salt if start == 0 else ''}".encode()
        hashes.append(hashlib.sha256(parent + block + extra).digest())
