"""A store over real memory files, and prompts for it. For tests."""

import mmap
import random
from collections.abc import Sequence

from cacheindex.keys import KEY_BYTES, Namespace, prompt_keys, proofs
from cachenode import shared
from cachenode.arena import Passage, Space
from cachenode.directory import Directory
from cachenode.directory_view import DirectoryView, Sizes
from cachenode.record import PROOF_BYTES, Layout
from cachenode.store import Store
from cachenode.wire import Lease, Reserve
from policies import eviction

TOKENS = 32


def layout(block_bytes: int = 4096, ranks: int = 1, memory: str = "test/1", tokens: int = TOKENS) -> Layout:
    return Layout(
        family="test",
        model="m",
        revision="r",
        memory=memory,
        dtype="float32",
        layers=1,
        heads=1,
        head_size=1,
        block_tokens=tokens,
        block_bytes=block_bytes,
        ranks=ranks,
    )


class Heard:
    """A sink that keeps what can be served, by fingerprint."""

    def __init__(self) -> None:
        self.keys: dict[str, list[bytes]] = {}
        self.calls = 0

    def stored(self, fingerprint: str, block_tokens: int, keys: bytes) -> None:
        self.calls += 1
        self.keys.setdefault(fingerprint, []).extend(_cut(keys))

    def removed(self, fingerprint: str, block_tokens: int, keys: bytes) -> None:
        self.calls += 1
        for key in _cut(keys):
            self.keys[fingerprint].remove(key)


class Prompt:
    """Keys and proofs of a prompt's engine blocks."""

    def __init__(self, tokens: Sequence[int], model: str = "m", block: int = TOKENS) -> None:
        namespace = Namespace(model)
        self.keys = b"".join(prompt_keys(namespace.root(b""), tokens)[block // 16 - 1 :: block // 16])
        self.proofs = b"".join(proofs(namespace, tokens, block))
        self.blocks = len(self.keys) // KEY_BYTES

    def reserve(self, first: int = 0, end: int | None = None, chunk: int = 8) -> Reserve:
        keys, given, base, parent, skip = self._part(first, end, chunk)
        return Reserve(1, base, keys, given, "", parent, skip)

    def lease(self, first: int = 0, end: int | None = None, chunk: int = 8) -> Lease:
        keys, given, base, _, skip = self._part(first, end, chunk)
        return Lease(1, base, keys, given, "", skip)

    def _part(self, first: int, end: int | None, chunk: int) -> tuple[bytes, bytes, int, bytes, int]:
        base, end = first // chunk * chunk, self.blocks if end is None else end
        keys = self.keys[KEY_BYTES * base : KEY_BYTES * end]
        parent = self.keys[KEY_BYTES * (base - 1) : KEY_BYTES * base] if base else b""
        return keys, self.proofs[PROOF_BYTES * base : PROOF_BYTES * end], base, parent, first - base


def prompt(seed: int, blocks: int, shared_blocks: int = 0) -> Prompt:
    """Of so many blocks; the first ``shared_blocks`` are the same for every seed."""
    begin = random.Random(0).choices(range(50_000), k=TOKENS * shared_blocks)
    rest = random.Random(seed + 1).choices(range(50_000), k=TOKENS * (blocks - shared_blocks))
    return Prompt(begin + rest)


class Room:
    """A store with its memory. ``arena`` can be read and written like a worker's mapping."""

    def __init__(self, size: int, records: int = 1000, policy: str = eviction.DEFAULT) -> None:
        sizes = Sizes.of(records, 16 * records)
        self.arena_fd = shared.memory_file("arena", size)
        self.arena: mmap.mmap = shared.map_fd(self.arena_fd, size, write=True)
        self.directory_fd = shared.memory_file("directory", sizes.bytes)
        memory = shared.map_fd(self.directory_fd, sizes.bytes, write=True)
        self.heard = Heard()
        self.directory = Directory(memoryview(memory), sizes)
        self.space = Space(size)
        self.eviction = eviction.build({"name": policy}, size)
        self.store = Store(self.space, self.directory, self.eviction, self.heard)
        self.view = DirectoryView(memoryview(shared.map_fd(self.directory_fd, sizes.bytes, write=False)))

    def write(self, passages: list[Passage], data: bytes) -> None:
        at = 0
        for offset, length in passages:
            self.arena[offset : offset + length] = data[at : at + length]
            at += length

    def read(self, passages: list[Passage]) -> bytes:
        return b"".join(self.arena[offset : offset + length] for offset, length in passages)


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
