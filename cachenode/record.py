"""What a record is: a run of consecutive engine blocks of one prefix, and the layout of its bytes.

A record holds the blocks of all ranks: the bytes of rank 0 (block after block), then those of rank 1, and
so on. It never crosses a chunk boundary of its prompt. Its *places* are its keys, moved by what must agree
before bytes mean the same (its *realm*), so that two layouts or two adapters never meet in one table.
"""

import hashlib

import msgspec
from xxhash import xxh3_128_digest

from cacheindex.keys import BLOCK_TOKENS, KEY_BYTES

CHUNK_TOKENS = 256
PROOF_BYTES = 32
MAX_CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
MAX_RANKS = 1024
MAX_BLOCK_BYTES = 1 << 36


class BadLayout(ValueError):
    """A layout that no record can have; the message says which field and why."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must agree before KV bytes mean the same thing.

    ``family`` is the engine's ("vllm", "transformers"), ``model`` its base model (the namespace),
    ``revision`` a digest of what was loaded, ``memory`` the name of the order of bytes inside a block,
    ``block_tokens`` the engine's block in tokens, ``block_bytes`` one block of one rank over all layers.
    """

    family: str
    model: str
    revision: str
    memory: str
    dtype: str
    layers: int
    heads: int
    head_size: int
    block_tokens: int
    block_bytes: int
    ranks: int = 1

    def check(self) -> None:
        """Raises BadLayout."""
        for name in ("layers", "heads", "head_size", "block_tokens", "block_bytes", "ranks"):
            if getattr(self, name) < 1:
                raise BadLayout(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.block_tokens % BLOCK_TOKENS:
            raise BadLayout(f"block_tokens must be a multiple of {BLOCK_TOKENS}, not {self.block_tokens}")
        if self.ranks > MAX_RANKS or self.block_bytes > MAX_BLOCK_BYTES:
            raise BadLayout(f"at most {MAX_RANKS} ranks and {MAX_BLOCK_BYTES} bytes a block are kept")

    def fingerprint(self) -> str:
        """32 hex digits; equal for equal layouts, in every process and on every machine."""
        return hashlib.sha256(b"hotprefix/layout/1" + msgspec.json.encode(self)).hexdigest()[:32]

    @property
    def chunk_blocks(self) -> int:
        """Engine blocks in a chunk: the fewest that are at least 256 tokens."""
        return -(-CHUNK_TOKENS // self.block_tokens)

    def record_bytes(self, blocks: int) -> int:
        return self.ranks * blocks * self.block_bytes


def realm(fingerprint: str, adapter: str) -> bytes:
    """16 bytes that stand for a layout and the digest of an adapter's files ("" without one)."""
    return xxh3_128_digest(f"{len(fingerprint)}:{fingerprint}{adapter}".encode("utf-8", "surrogatepass"))


def moved(packed: bytes, by: bytes) -> bytes:
    """Keys to places, or places to keys: each 16 bytes of ``packed`` xor ``by``."""
    pattern = by * (len(packed) // KEY_BYTES)
    return (int.from_bytes(packed, "little") ^ int.from_bytes(pattern, "little")).to_bytes(
        len(packed), "little"
    )
