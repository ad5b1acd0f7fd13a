"""What engines and the node say to each other on the control socket: the messages and their frames.

A frame is its length (4 bytes, little endian, at most ``MAX_FRAME``) and a msgpack body. Each request
carries an ``id`` chosen by the client and gets exactly one reply with that id, an error reply included;
replies carry the node's ``boot`` id, new in each life of the node. Bulk bytes travel only in copy mode
(``Write``, ``Read``), for engines that cannot map the node's memory; otherwise the node hands its memory
over as a file descriptor beside ``Welcome``.
"""

import struct
from typing import Literal

import msgspec

from cachenode.record import Layout

VERSION = 1
MAX_FRAME = 4 * 1024 * 1024
MAX_COPY = 1024 * 1024
"""Most bytes of one ``Write`` or ``Read``."""
MAX_BLOCKS = 65_536
"""Most blocks of one ``Reserve`` or ``Lease``."""
MAX_IDS = 65_536
_LENGTH = struct.Struct("<I")

Role = Literal["scheduler", "worker"]
Mode = Literal["map", "copy"]


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The first request of every connection, and only that.

    ``session`` is a random name (16 to 64 characters) of one life of an engine's connector; its scheduler
    says it first, its workers (one a rank) join it. ``worker`` is the engine's configured name. ``ended``
    are earlier sessions of the same process: it has no copy in flight of any of them.
    """

    id: int
    version: int
    role: Role
    session: str
    worker: str
    rank: int
    layout: Layout
    mode: Mode
    ended: list[str] = []


class Reserve(msgspec.Struct, frozen=True, tag="reserve", array_like=True):
    """Space for those of a prompt's blocks that are not held yet.

    ``keys`` (16 bytes a block) and ``proofs`` (32 bytes a block) begin with block ``first`` of the prompt.
    The first ``skip`` of them only say where in a chunk the wanted ones stand: a record is found by its
    first block, so keys begin where the chunk of the first wanted block begins. ``adapter``: digest of the
    adapter's files. ``parent``: the key of the block before ``first``, b"" at the start of a prompt.
    """

    id: int
    first: int
    keys: bytes
    proofs: bytes
    adapter: str = ""
    parent: bytes = b""
    skip: int = 0


class Commit(msgspec.Struct, frozen=True, tag="commit", array_like=True):
    """The bytes of these reservations are written by every rank. An unknown one is left out of the
    ``Done`` count."""

    id: int
    reservations: list[int]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """These reservations will not be written, and nobody is writing them any more."""

    id: int
    reservations: list[int]


class Lease(msgspec.Struct, frozen=True, tag="lease", array_like=True):
    """The right to read the leading blocks of these that are held; fields as in ``Reserve``."""

    id: int
    first: int
    keys: bytes
    proofs: bytes
    adapter: str = ""
    skip: int = 0


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    id: int
    leases: list[int]


class Forget(msgspec.Struct, frozen=True, tag="forget", array_like=True):
    """Drop all that is held in the session's layout, of every adapter."""

    id: int


class Quiet(msgspec.Struct, frozen=True, tag="quiet", array_like=True):
    """As ``Hello.ended``, said later."""

    id: int
    ended: list[str]


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    id: int


class Write(msgspec.Struct, frozen=True, tag="write", array_like=True):
    """Copy mode: bytes for ``rank``'s part of a reservation, from ``offset`` of that part on."""

    id: int
    reservation: int
    rank: int
    offset: int
    data: bytes


class Read(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """Copy mode: ``length`` bytes of ``rank``'s part of piece number ``piece`` of a lease; ``offset``
    counts from the first leased block of that part."""

    id: int
    lease: int
    piece: int
    rank: int
    offset: int
    length: int


Request = Hello | Reserve | Commit | Abort | Lease | Release | Forget | Quiet | Ping | Write | Read


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One new record to write: ``blocks`` blocks from block ``first`` of the prompt on.

    ``passages`` are (offset, length) in the arena; one after the other they are the record's bytes:
    ``ranks`` parts of ``blocks * block_bytes``."""

    reservation: int
    first: int
    blocks: int
    passages: list[tuple[int, int]]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one record that may be read: prompt blocks ``first`` to ``first + blocks``, which are the
    blocks from ``start`` on of a record of ``of`` blocks. ``passages`` are the whole record's, as in
    ``Grant``. ``slot`` and ``generation`` find the record again in the directory: after a copy, another
    generation means that the bytes are not to be trusted."""

    slot: int
    generation: int
    first: int
    blocks: int
    start: int
    of: int
    passages: list[tuple[int, int]]


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """``fingerprint`` is the layout's. In map mode a scheduler gets the directory's descriptor with it
    (``bytes`` long, read-only), a worker two: the arena's (``bytes`` long) and the directory's
    (``directory_bytes``)."""

    id: int
    boot: str
    node: str
    fingerprint: str
    mode: Mode
    bytes: int
    directory_bytes: int


class Reserved(msgspec.Struct, frozen=True, tag="reserved", array_like=True):
    """``grants`` in prompt order. ``admitted``: that many leading wanted blocks are held, being
    written by somebody, or granted; the rest did not fit (``why`` says so, "" where all did)."""

    id: int
    boot: str
    grants: list[Grant]
    admitted: int
    why: str = ""


class Leased(msgspec.Struct, frozen=True, tag="leased", array_like=True):
    """``blocks``: so many leading wanted blocks may be read. ``lease`` is 0 where that is none."""

    id: int
    boot: str
    lease: int
    blocks: int
    pieces: list[Piece]


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """``count``: how many of the named things there were."""

    id: int
    boot: str
    count: int = 0


class Data(msgspec.Struct, frozen=True, tag="data", array_like=True):
    id: int
    boot: str
    data: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """``id`` is -1 where the request's could not be read. The connection lives on unless ``fatal``."""

    id: int
    boot: str
    code: str
    message: str
    fatal: bool = False


Reply = Welcome | Reserved | Leased | Done | Data | Failed


class BadFrame(ValueError):
    """Bytes that are no message of this protocol."""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """Raises ValueError for a message longer than a frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes, at most {MAX_FRAME} fit a frame")
    return _LENGTH.pack(len(body)) + body


def request(body: bytes) -> Request:
    """Raises BadFrame."""
    try:
        return _requests.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from error


def reply(body: bytes) -> Reply:
    """Raises BadFrame."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadFrame(str(error)) from error


def request_id(body: bytes) -> int:
    """The id of a request that could not be understood otherwise, -1 where it has none."""
    try:
        fields = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return -1
    found = fields[1] if isinstance(fields, list) and len(fields) > 1 else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else -1


class Frames:
    """Cuts a byte stream into frame bodies. ``feed`` raises BadFrame for a length out of bounds: after
    that the stream cannot be followed any more."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        bodies, at = [], 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if not 0 < length <= MAX_FRAME:
                raise BadFrame(f"a frame of {length} bytes, from 1 to {MAX_FRAME} are read")
            if len(buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size + length
            bodies.append(bytes(buffer[at - length : at]))
        del buffer[:at]
        return bodies

    @property
    def waiting(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._buffer)
