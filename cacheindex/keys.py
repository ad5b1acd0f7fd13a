"""Names for pieces of prompt: namespaces, chained keys, proofs.

Found by key, proved by SHA-256: a key (xxh3, 128 bit) is fast to compute and never trusted with
bytes; a proof (SHA-256 over everything a key stands for) is. Nothing here depends on
``PYTHONHASHSEED`` or on any engine's own hash values. This file knows no engine, tier or request.
"""

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from xxhash import xxh3_128_digest

BLOCK_TOKENS = 16
"""Tokens in a block, the unit of hashing. Only full blocks have a key."""

KEY_BYTES = 16
MAX_TOKEN = 2**32 - 1

Kind = Literal["tokens", "text"]


class Extra(msgspec.Struct, frozen=True):
    """What tokens alone do not say: the identifier of a multimodal item and the absolute
    offset (in tokens) of its first token. It enters one key: that of the block holding the offset."""

    offset: int
    identifier: str


class Namespace(msgspec.Struct, frozen=True):
    """What must agree before tokens mean the same thing.

    ``model`` is the base model (first id of the engine's ``/v1/models``), ``adapter`` the LoRA
    name or "", ``salt`` the tenant salt or "". ``kind`` is "text" for prompts that could not be
    tokenized: their keys run over pieces of text and never meet token keys.
    """

    model: str
    adapter: str = ""
    salt: str = ""
    kind: Kind = "tokens"

    def encoded(self) -> bytes:
        """Tagged, length-prefixed fields: two different namespaces never encode alike."""
        fields = (b"hotprefix/1", self.kind.encode(), *map(_utf8, (self.model, self.adapter, self.salt)))
        return b"".join(struct.pack("<I", len(field)) + field for field in fields)

    def root(self, secret: bytes) -> bytes:
        """The key before the first block. With a salt it is keyed by ``secret`` (at least 16
        bytes), so that nobody without it can compute, or recognise, a tenant's keys."""
        if not self.salt:
            return xxh3_128_digest(self.encoded())
        if len(secret) < 16:
            raise ValueError("a salted namespace needs a secret of at least 16 bytes")
        return hmac.digest(secret, self.encoded(), hashlib.sha256)[:KEY_BYTES]


class Chain:
    """A growing sequence of tokens under one root and the keys of its full blocks.

    Feeding it in pieces of any size gives the same keys as feeding it at once, so one chain
    serves prompts as well as engines of every block size. ``copy`` forks it.
    """

    __slots__ = ("key", "length", "pending")

    def __init__(self, root: bytes) -> None:
        self.key = root
        self.length = 0
        self.pending = b""

    def copy(self) -> "Chain":
        fork = Chain(self.key)
        fork.length, fork.pending = self.length, self.pending
        return fork

    def extend(self, tokens: Sequence[int], extras: Sequence[Extra] = ()) -> list[bytes]:
        """Append ``tokens``; return the keys of the blocks this completed, in order.

        ``extras`` are those whose offset lies in the blocks being completed now. Raises
        ValueError for a token outside 0 … 2**32 - 1.
        """
        data = self.pending + pack_tokens(tokens)
        first_block = self.length // BLOCK_TOKENS
        keys: list[bytes] = []
        key, width = self.key, 4 * BLOCK_TOKENS
        full = len(data) - len(data) % width
        by_block = _by_block(extras) if extras else None
        for index, start in enumerate(range(0, full, width)):
            block = data[start : start + width]
            if by_block is not None:
                block += by_block.get(first_block + index, b"")
            key = xxh3_128_digest(key + block)
            keys.append(key)
        self.key, self.pending = key, data[full:]
        self.length += len(tokens)
        return keys


def prompt_keys(root: bytes, tokens: Sequence[int], extras: Sequence[Extra] = ()) -> list[bytes]:
    """The keys of all full blocks of a prompt: ``len(tokens) // 16`` of them."""
    return Chain(root).extend(tokens, extras)


class Proofs:
    """A growing sequence of tokens and the proofs of its full engine blocks: SHA-256 over namespace,
    extras and all tokens up to each block's end. Feeding it in pieces of any size gives the same proofs
    as feeding it at once.

    Each digest ends with the two lengths, so no two different inputs are written alike. ``extras`` are
    all of the prompt; one counts from the end of the block that holds its offset.
    """

    __slots__ = ("_block_size", "_extras", "_pending", "_state", "length")

    def __init__(self, namespace: Namespace, block_size: int, extras: Sequence[Extra] = ()) -> None:
        self.length = 0
        self._block_size = block_size
        self._extras = sorted(extras, key=lambda extra: (extra.offset, extra.identifier))
        self._state = hashlib.sha256(namespace.encoded())
        self._pending = b""

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Append ``tokens``; return the proofs of the blocks this completed, in order. Raises ValueError
        for a token outside 0 … 2**32 - 1."""
        data = self._pending + pack_tokens(tokens)
        width = 4 * self._block_size
        full = len(data) - len(data) % width
        end = self.length // self._block_size * self._block_size
        found: list[bytes] = []
        for start in range(0, full, width):
            end += self._block_size
            self._state.update(data[start : start + width])
            inside = b"".join(_encode_extra(extra) for extra in self._extras if extra.offset < end)
            digest = self._state.copy()
            digest.update(inside + struct.pack("<QQ", end, len(inside)))
            found.append(digest.digest())
        self._pending = data[full:]
        self.length += len(tokens)
        return found


def proofs(
    namespace: Namespace, tokens: Sequence[int], block_size: int, extras: Sequence[Extra] = ()
) -> Iterator[bytes]:
    """The proofs of all full engine blocks of a prompt, as ``Proofs`` gives them."""
    yield from Proofs(namespace, block_size, extras).extend(tokens)


def text_tokens(text: str) -> "array[int]":
    """Text as pseudo-tokens of four UTF-8 bytes, for a ``text`` namespace: 64 bytes a block,
    about as much prompt as 16 tokens of English."""
    data = _utf8(text)
    return _words(data + b"\0" * (-len(data) % 4))


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as they travel: one after the other, 16 bytes each."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """The reverse of ``pack_keys``. Raises ValueError when the length is no multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys must be a multiple of {KEY_BYTES} bytes, got {len(packed)}")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as uint32, little endian. Raises ValueError for anything that is no such number."""
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to {MAX_TOKEN}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _words(data: bytes) -> "array[int]":
    words = array("I", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _utf8(text: str) -> bytes:
    # Lone surrogates are legal in JSON strings; they must name something rather than raise.
    return text.encode("utf-8", "surrogatepass")


def _encode_extra(extra: Extra) -> bytes:
    name = _utf8(extra.identifier)
    return struct.pack("<QI", extra.offset, len(name)) + name


def _by_block(extras: Sequence[Extra]) -> dict[int, bytes]:
    blocks: dict[int, bytes] = {}
    for extra in sorted(extras, key=lambda extra: (extra.offset, extra.identifier)):
        index = extra.offset // BLOCK_TOKENS
        blocks[index] = blocks.get(index, b"") + _encode_extra(extra)
    return blocks
