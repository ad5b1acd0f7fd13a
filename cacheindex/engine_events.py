"""What engines say of their KV cache, read into neutral words: the only file that knows dialects.

vLLM (maps with ``type``; positional arrays before mid-2026), SGLang (positional arrays) and their
relatives publish ZMQ frames ``[topic, 8-byte big-endian sequence, msgpack]`` with a payload
``[timestamp, events, data_parallel_rank?]``. Reading is bounded in every size, keeps what it
understands, counts what it does not, and raises nothing but BadFrame.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from cacheindex.events import Tier

MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_EVENTS = 65_536
MAX_NAME = 512
"""Longest hash, adapter name, salt or item identifier that is read, in characters or bytes."""

Hash = int | bytes | str

_END = b"\xff" * 8
_SEQ_LIMIT = 2**63

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": ("medium",),
}

_TIERS: Final[Mapping[str, Tier]] = {
    **dict.fromkeys(("gpu", "device", "hbm", "vram", "g1"), "gpu"),
    **dict.fromkeys(("cpu", "host", "memory", "dram", "cpu_pinned", "cpu_tier1", "shm", "g2"), "memory"),
    **dict.fromkeys(("disk", "ssd", "nvme", "storage", "file", "local_disk", "cpu_tier2", "g3"), "disk"),
    **dict.fromkeys(("remote", "external", "object", "obj", "s3", "network", "g4"), "remote"),
}

FULL_ATTENTION = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of KV group in which a block, once stored, serves every prompt that begins with it."""


class BadFrame(ValueError):
    """Frames that are no engine's batch. The message never quotes what was in them."""


class BlockExtras(msgspec.Struct, frozen=True):
    """What a block's hash covers beside its tokens. ``words``: bare strings without the adapter's
    name; in a prompt's first block that is the salt. ``items``: identifiers of multimodal items
    with the offset of their first token relative to the block. ``opaque``: there is more, which
    cannot be named (embeddings). Its repr shows nothing of it."""

    words: tuple[str, ...] = ()
    items: tuple[tuple[str, int], ...] = ()
    opaque: bool = False

    def __repr__(self) -> str:
        return "BlockExtras(…)"


class BlockStored(msgspec.Struct, frozen=True):
    """``extras`` has one entry a block, or is empty. ``tier`` is None for an unknown medium."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: list[int]
    block_size: int
    tier: Tier | None
    adapter: str = ""
    group: int = 0
    kind: str | None = None
    extras: tuple[BlockExtras | None, ...] = ()


class BlockRemoved(msgspec.Struct, frozen=True):
    hashes: tuple[Hash, ...]
    tier: Tier | None
    group: int = 0


class AllCleared(msgspec.Struct, frozen=True):
    """``tier`` is None where everything was cleared."""

    tier: Tier | None


EngineEvent = BlockStored | BlockRemoved | AllCleared


class EngineBatch(msgspec.Struct, frozen=True):
    """One message. ``digest`` tells two messages with one sequence number apart, ``size`` is in
    bytes, ``skipped`` counts what was passed over by cause."""

    seq: int
    digest: int
    size: int
    timestamp: float | None
    rank: int | None
    events: tuple[EngineEvent, ...]
    skipped: Mapping[str, int]


class ReplayEnd:
    """The engine has no more to replay."""


_decoder = msgspec.msgpack.Decoder()


def parse(frames: Sequence[bytes]) -> EngineBatch:
    """One message of a subscription. Raises BadFrame."""
    if len(frames) != 3:
        raise BadFrame(f"{len(frames)} frames, expected 3")
    return _parse(frames[1], frames[2])


def parse_replay(frames: Sequence[bytes]) -> EngineBatch | type[ReplayEnd]:
    """One answer of a replay: ``[empty, topic, sequence, payload]``, without the topic from older
    engines. Raises BadFrame."""
    if len(frames) not in (3, 4) or frames[0] != b"":
        raise BadFrame(f"{len(frames)} frames in a replay, expected 4 beginning with an empty one")
    seq, payload = frames[-2], frames[-1]
    if seq == _END and payload == b"":
        return ReplayEnd
    return _parse(seq, payload)


def replay_request(from_seq: int) -> list[bytes]:
    """The frames that ask for all batches from this number on."""
    return [b"", from_seq.to_bytes(8, "big")]


def _parse(seq_frame: bytes, payload: bytes) -> EngineBatch:
    if len(seq_frame) != 8:
        raise BadFrame(f"a sequence number of {len(seq_frame)} bytes, expected 8")
    if len(payload) > MAX_FRAME_BYTES:
        raise BadFrame(f"a payload of {len(payload)} bytes, at most {MAX_FRAME_BYTES} are read")
    seq = int.from_bytes(seq_frame, "big")
    if seq >= _SEQ_LIMIT:
        raise BadFrame("a sequence number out of range")
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError):
        # ``from None``: the cause's text may quote the payload.
        raise BadFrame("a payload that is no msgpack") from None
    timestamp, raw_events, rank = _batch_fields(batch)
    skipped: dict[str, int] = {}
    events = tuple(event for raw in raw_events if (event := _event(raw, skipped)) is not None)
    return EngineBatch(
        seq=seq,
        digest=xxh3_64_intdigest(payload),
        size=len(payload),
        timestamp=timestamp,
        rank=rank,
        events=events,
        skipped=skipped,
    )


def _batch_fields(batch: object) -> tuple[float | None, list[object], int | None]:
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise BadFrame("a payload that is no batch of events")
    if len(batch[1]) > MAX_EVENTS:
        raise BadFrame(f"{len(batch[1])} events, at most {MAX_EVENTS} are read")
    timestamp = float(batch[0]) if isinstance(batch[0], int | float) else None
    return timestamp, batch[1], _whole(batch[2]) if len(batch) > 2 else None


def _event(raw: object, skipped: dict[str, int]) -> EngineEvent | None:
    kind, fields = _fields(raw, skipped)
    event: EngineEvent | None = None
    if kind == "BlockStored":
        event = _stored(fields)
    elif kind == "BlockRemoved":
        event = _removed(fields)
    elif kind == "AllBlocksCleared":
        event = AllCleared(tier=None if fields.get("medium") is None else _tier(fields))
        if event.tier is None and fields.get("medium") is not None:
            _count(skipped, "unknown_medium")
            return None
    else:
        _count(skipped, "unknown_event")
        return None
    if event is None:
        _count(skipped, "bad_event")
    return event


def _fields(raw: object, skipped: dict[str, int]) -> tuple[object, dict[object, object]]:
    """The event's kind and its fields by name, from either encoding."""
    if isinstance(raw, dict):
        kind = raw.get("type")
        known = _FIELDS.get(kind) if isinstance(kind, str) else None
        extra = 0 if known is None else sum(name != "type" and name not in known for name in raw)
        fields = raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        known = _FIELDS.get(kind) if isinstance(kind, str) else None
        extra = max(0, len(raw) - 1 - len(known or raw))
        fields = dict(zip(known or (), raw[1:], strict=False))
    else:
        return None, {}
    if extra:
        _count(skipped, "unknown_field", extra)
    return kind, fields


def _stored(fields: Mapping[object, object]) -> BlockStored | None:
    hashes = _hashes(fields.get("block_hashes"))
    parent = fields.get("parent_block_hash")
    tokens, block_size = fields.get("token_ids"), _whole(fields.get("block_size"))
    group = fields.get("group_idx")
    if hashes is None or not isinstance(tokens, list) or block_size is None or block_size < 0:
        return None
    if not (parent is None or _is_hash(parent)) or not (group is None or _whole(group) is not None):
        return None
    adapter = _adapter(fields)
    extras = _extras(fields.get("extra_keys"), fields)
    if adapter is None or extras is None or len(extras) not in (0, len(hashes)):
        return None
    return BlockStored(
        hashes=hashes,
        parent=parent if isinstance(parent, int | bytes | str) else None,
        tokens=tokens,
        block_size=block_size,
        tier=_tier(fields),
        adapter=adapter,
        group=_whole(group) or 0,
        kind=_kind(fields.get("kv_cache_spec_kind")),
        extras=extras,
    )


def _removed(fields: Mapping[object, object]) -> BlockRemoved | None:
    hashes, group = _hashes(fields.get("block_hashes")), fields.get("group_idx")
    if hashes is None or not (group is None or _whole(group) is not None):
        return None
    return BlockRemoved(hashes=hashes, tier=_tier(fields), group=_whole(group) or 0)


def _hashes(raw: object) -> tuple[Hash, ...] | None:
    if not isinstance(raw, list) or not all(map(_is_hash, raw)):
        return None
    return tuple(raw)


def _is_hash(raw: object) -> bool:
    if isinstance(raw, int):
        return not isinstance(raw, bool)
    return isinstance(raw, bytes | str) and len(raw) <= MAX_NAME


def _whole(raw: object) -> int | None:
    return raw if isinstance(raw, int) and not isinstance(raw, bool) else None


def _kind(raw: object) -> str | None:
    if raw is None:
        return None
    # It ends up in a reason shown to people: nothing but a plain word passes.
    return raw if isinstance(raw, str) and len(raw) <= 64 and raw.isidentifier() else "unreadable"


def _tier(fields: Mapping[object, object]) -> Tier | None:
    medium, locality = fields.get("medium"), fields.get("locality")
    if medium is None:
        return "gpu"
    tier = _TIERS.get(medium.casefold()) if isinstance(medium, str) else None
    if tier is not None and isinstance(locality, str) and locality.casefold() == "remote":
        return "remote"
    return tier


def _adapter(fields: Mapping[object, object]) -> str | None:
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if isinstance(name, str):
        return name if len(name) <= MAX_NAME else None
    if name is not None:
        return None
    # An engine that tells only its own number for an adapter: a namespace nobody asks for.
    return "" if number is None else f"#{number}" if _whole(number) is not None else None


def _extras(raw: object, fields: Mapping[object, object]) -> tuple[BlockExtras | None, ...] | None:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        return None
    name = fields.get("lora_name")
    adapted = name is not None or fields.get("lora_id") is not None
    return tuple(_block_extras(entry, name, adapted) for entry in raw)


def _block_extras(raw: object, name: object, adapted: bool) -> BlockExtras | None:
    if raw is None:
        return None
    if not isinstance(raw, list):
        return BlockExtras(opaque=True)
    words: list[str] = []
    items: list[tuple[str, int]] = []
    opaque = False
    for position, entry in enumerate(raw):
        if isinstance(entry, str) and len(entry) <= MAX_NAME:
            if not (position == 0 and adapted and name in (None, entry)):
                words.append(entry)
        elif isinstance(entry, list) and len(entry) == 2:
            identifier, offset = entry
            if isinstance(identifier, str) and len(identifier) <= MAX_NAME and _whole(offset) is not None:
                items.append((identifier, offset))
            else:
                opaque = True
        else:
            opaque = True
    return BlockExtras(tuple(words), tuple(items), opaque)


def _count(skipped: dict[str, int], cause: str, by: int = 1) -> None:
    skipped[cause] = skipped.get(cause, 0) + by
