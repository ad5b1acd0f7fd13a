"""vLLM's wire form of KV events: ``[topic, 8-byte BE sequence, msgpack [ts, events, dp_rank]]``.

Newer vLLM writes an event as a map with ``type``, older ones as a positional array whose first
item is the type; trailing fields that have their default are left out. Hashes are 64-bit integers
(vLLM's default), raw bytes, or text, as other publishers of this form use.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from loadtest.sim.cache import CacheEvent, Removed, Space, Stored

Encoding = Literal["map", "array"]
HashForm = Literal["int", "bytes", "str"]
WireHash = int | bytes | str

END_SEQ = b"\xff" * 8
"""Sequence of the frame that ends a replay; its payload is empty."""


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _StoredArray(_StoredMap, tag="BlockStored", array_like=True):
    pass


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class _RemovedArray(_RemovedMap, tag="BlockRemoved", array_like=True):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class EventEncoder:
    """Cache events to payload bytes. ``adapters`` gives each LoRA name its integer id."""

    def __init__(
        self,
        block_size: int,
        encoding: Encoding = "map",
        hashes: HashForm = "int",
        adapters: Mapping[str, int] | None = None,
        dp_rank: int = 0,
    ) -> None:
        self._block_size = block_size
        self._array = encoding == "array"
        self._form = hashes
        self._adapters = dict(adapters or {})
        self._dp_rank = dp_rank
        self._encoder = msgspec.msgpack.Encoder()

    def payload(self, timestamp: float, events: Sequence[CacheEvent]) -> bytes:
        """One batch."""
        return self._encoder.encode([timestamp, [self._event(event) for event in events], self._dp_rank])

    def hash(self, digest: bytes) -> WireHash:
        """A block's hash as it is written."""
        if self._form == "int":
            return int.from_bytes(digest[-8:], "big")
        return digest if self._form == "bytes" else digest.hex()

    def _event(self, event: CacheEvent) -> msgspec.Struct:
        if isinstance(event, Stored):
            return self._stored(event)
        if isinstance(event, Removed):
            removed = _RemovedArray if self._array else _RemovedMap
            return removed(block_hashes=[self.hash(event.hash)], medium="GPU", group_idx=0)
        return _ClearedArray() if self._array else _ClearedMap()

    def _stored(self, event: Stored) -> msgspec.Struct:
        stored = _StoredArray if self._array else _StoredMap
        adapter = event.space.adapter
        return stored(
            block_hashes=[self.hash(digest) for digest in event.hashes],
            parent_block_hash=None if event.parent is None else self.hash(event.parent),
            token_ids=event.tokens,
            block_size=self._block_size,
            lora_id=self._adapters.get(adapter),
            medium="GPU",
            lora_name=adapter or None,
            extra_keys=[_extra_keys(event.space, event.first + i) for i in range(len(event.hashes))],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )


def _extra_keys(space: Space, index: int) -> tuple[str, ...] | None:
    # The adapter's name is in every block's keys, the salt in the first block's only.
    keys: tuple[str, ...] = (space.adapter,) if space.adapter else ()
    if index == 0 and space.salt:
        keys += (space.salt,)
    return keys or None
