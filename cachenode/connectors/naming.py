"""Names of one request's blocks: which namespace it is in, and its keys and proofs as it grows.

Keys are the gateway's (the adapter by name), so that a node's events mean the same to the index. Proofs
cover the digest of the adapter's files too: two files under one name never share bytes. Knows no engine.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from cacheindex.keys import BLOCK_TOKENS, KEY_BYTES, Chain, Extra, Namespace, Proofs
from cachenode.record import PROOF_BYTES

Refusal = Literal["salt_without_secret", "adapter_unread", "embeddings", "streaming", "unnamed_item"]
"""Why a request is neither stored nor loaded."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request decides its names. ``adapter_digest``: None while (or where) the adapter's files
    are not read. ``items``: identifier and offset of each multimodal item's first token."""

    salt: str = ""
    adapter: str = ""
    adapter_digest: str | None = ""
    items: tuple[tuple[str | None, int], ...] = ()
    embeddings: bool = False
    streaming: bool = False


class Names:
    """Keys and proofs of a request's full engine blocks, packed; grown by ``extend``, never computed
    twice. ``adapter`` is the digest of the adapter's files."""

    def __init__(
        self,
        namespace: Namespace,
        root: bytes,
        block_tokens: int,
        adapter: str,
        extras: Sequence[Extra],
    ) -> None:
        self.adapter = adapter
        self.block_tokens = block_tokens
        self._chain = Chain(root)
        proved = msgspec.structs.replace(namespace, adapter=f"{namespace.adapter}@{adapter}")
        self._proofs = Proofs(proved if adapter else namespace, block_tokens, extras)
        self._extras = extras
        self._per_block = block_tokens // BLOCK_TOKENS
        self._small = 0
        self._key_bytes = bytearray()
        self._proof_bytes = bytearray()

    @property
    def tokens(self) -> int:
        """How many tokens it was fed."""
        return self._chain.length

    @property
    def blocks(self) -> int:
        """Full engine blocks that have names."""
        return len(self._key_bytes) // KEY_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``, which follow those fed before."""
        for key in self._chain.extend(tokens, self._extras):
            self._small += 1
            if self._small % self._per_block == 0:
                self._key_bytes += key
        for proof in self._proofs.extend(tokens):
            self._proof_bytes += proof

    def keys(self, first: int, end: int) -> bytes:
        """Keys of the blocks from ``first`` up to ``end``, 16 bytes each."""
        return bytes(self._key_bytes[KEY_BYTES * first : KEY_BYTES * end])

    def proofs(self, first: int, end: int) -> bytes:
        """Their proofs, 32 bytes each."""
        return bytes(self._proof_bytes[PROOF_BYTES * first : PROOF_BYTES * end])

    def parent(self, first: int) -> bytes:
        """The key of the block before ``first``; b"" at the start."""
        return self.keys(first - 1, first) if first else b""


class Namer:
    """Gives requests their names. ``secret`` is the deployment's, or None: then salted requests get none."""

    def __init__(self, model: str, block_tokens: int, secret: bytes | None) -> None:
        self._model, self._block_tokens, self._secret = model, block_tokens, secret

    def names(self, asked: Asked) -> Names | Refusal:
        """Empty names for the request, or why it has none."""
        if asked.embeddings:
            return "embeddings"
        if asked.streaming:
            return "streaming"
        if asked.salt and self._secret is None:
            return "salt_without_secret"
        if asked.adapter and not asked.adapter_digest:
            return "adapter_unread"
        extras = [Extra(offset, name) for name, offset in asked.items if name]
        if len(extras) != len(asked.items):
            return "unnamed_item"
        namespace = Namespace(self._model, asked.adapter, asked.salt)
        root = namespace.root(self._secret or b"")
        digest = (asked.adapter_digest or "") if asked.adapter else ""
        return Names(namespace, root, self._block_tokens, digest, extras)
