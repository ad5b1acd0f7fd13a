"""What a source says of the keys it holds: hotprefix's own events, versioned, as msgpack.

Engines speak other dialects; ``engine_events`` translates them into these. Keys travel packed,
16 bytes each. A source answers ``Replay`` with the batches after a sequence number it still has,
and ``Snapshot`` with everything it holds now.
"""

from typing import Literal

import msgspec

from cacheindex.keys import BLOCK_TOKENS, KEY_BYTES

VERSION = 1
MAX_BATCH_BYTES = 64 * 1024 * 1024
MAX_EVENTS = 65_536

Tier = Literal["gpu", "memory", "disk", "remote"]
TIERS: tuple[Tier, ...] = ("gpu", "memory", "disk", "remote")


class Stored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """The source can serve these keys now. Said after the bytes can be read. ``stride``: tokens of a
    block of this layout, a multiple of 16; the keys are those of whole blocks."""

    tier: Tier
    layout: str
    keys: bytes
    stride: int = BLOCK_TOKENS


class Removed(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """The source no longer serves these keys. Said before the bytes are freed."""

    tier: Tier
    layout: str
    keys: bytes
    stride: int = BLOCK_TOKENS


class Cleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """Everything in this tier and layout is gone."""

    tier: Tier
    layout: str
    stride: int = BLOCK_TOKENS


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", array_like=True):
    """Sent each second. ``fill`` is bytes used per tier, ``rates`` bytes per second measured per
    tier, ``serves`` the (worker, layout) pairs the source works for."""

    last_seq: int
    fill: dict[str, int]
    rates: dict[str, float]
    serves: list[tuple[str, str]]


Event = Stored | Removed | Cleared | Heartbeat


class Batch(msgspec.Struct, frozen=True, tag="batch", array_like=True):
    """Events of one source in one of its lives (epoch), numbered from 0 without holes."""

    version: int
    source: str
    epoch: str
    seq: int
    events: list[Event]


class Replay(msgspec.Struct, frozen=True, tag="replay", array_like=True):
    """Ask for all batches of the current epoch from this number on."""

    from_seq: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """Ask for all that is held now, and the number up to which that is true."""


Request = Replay | Snapshot


class BadEvent(ValueError):
    """A message that is not ours, too large, or of another version."""


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(Batch)
_requests = msgspec.msgpack.Decoder(Request)


def encode(message: Batch | Request) -> bytes:
    return _encoder.encode(message)


def decode_batch(data: bytes) -> Batch:
    """Raises BadEvent for anything but a well-formed batch of this version."""
    if len(data) > MAX_BATCH_BYTES:
        raise BadEvent(f"batch of {len(data)} bytes, at most {MAX_BATCH_BYTES} are read")
    try:
        batch = _batches.decode(data)
    except msgspec.DecodeError as error:
        raise BadEvent(str(error)) from error
    if batch.version != VERSION:
        raise BadEvent(f"event version {batch.version}, this reads {VERSION}")
    if batch.seq < 0 or len(batch.events) > MAX_EVENTS:
        raise BadEvent(f"batch of {len(batch.events)} events with sequence {batch.seq}")
    for event in batch.events:
        if isinstance(event, Stored | Removed) and len(event.keys) % KEY_BYTES:
            raise BadEvent(f"packed keys of {len(event.keys)} bytes")
    return batch


def decode_request(data: bytes) -> Request:
    """Raises BadEvent for anything but a well-formed request."""
    try:
        return _requests.decode(data)
    except msgspec.DecodeError as error:
        raise BadEvent(str(error)) from error
