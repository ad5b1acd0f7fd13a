"""What the node says of what it holds: changes gathered into numbered batches, the last of them kept.

No I/O. A snapshot is told in parts while the store goes on changing: all its parts carry the number of the
last batch before it began, and whoever applies the later batches to it in their order ends with what is so,
because storing what is stored and removing what is not there change nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator

from cacheindex.events import VERSION, Batch, Event, Heartbeat, Removed, Stored, encode
from cacheindex.keys import KEY_BYTES

HEARTBEAT_S = 1.0
MAX_KEYS = 4096
"""Of one batch."""
RING_BATCHES = 16_384
RING_BYTES = 4 * 1024 * 1024

Told = tuple[int, list[tuple[str, str]]]
"""Of a heartbeat: bytes used, and (worker, layout) of the open sessions."""
Held = Callable[[], Iterator[tuple[str, int, bytes]]]


class Journal:
    """A sink for the store. ``epoch`` names this life of the node, ``seq`` is the next batch's number."""

    def __init__(self, node: str, epoch: str, held: Held | None = None) -> None:
        self.node, self.epoch, self.seq = node, epoch, 0
        self.held: Held = held or (lambda: iter(()))
        """All that is held, for snapshots; set once there is a store."""
        self._changes: deque[tuple[type[Stored] | type[Removed], str, int, bytes]] = deque()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._beat_at = float("-inf")

    # ---- the store's sink ----

    def stored(self, fingerprint: str, block_tokens: int, keys: bytes) -> None:
        self._changes.append((Stored, fingerprint, block_tokens, keys))

    def removed(self, fingerprint: str, block_tokens: int, keys: bytes) -> None:
        self._changes.append((Removed, fingerprint, block_tokens, keys))

    # ---- batches ----

    def take(self, now: float, told: Callable[[], Told]) -> list[bytes]:
        """Encoded batches of all that changed since, in order, and a heartbeat each second, for which
        ``told`` is asked."""
        out: list[bytes] = []
        while self._changes:
            out.append(self._batch(self._events()))
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            used_bytes, serves = told()
            out.append(self._batch([Heartbeat(self.seq, {"memory": used_bytes}, {}, serves)]))
        return out

    def _events(self) -> list[Event]:
        """The next changes, neighbours of one kind and layout in one event."""
        events: list[Event] = []
        parts: list[bytes] = []
        keys = 0
        while self._changes and keys < MAX_KEYS:
            kind, layout, stride, packed = self._changes.popleft()
            parts.append(packed)
            keys += len(packed) // KEY_BYTES
            following = self._changes[0][:3] if self._changes else None
            if following != (kind, layout, stride) or keys >= MAX_KEYS:
                events.append(kind("memory", layout, b"".join(parts), stride))
                parts.clear()
        return events

    def _batch(self, events: list[Event]) -> bytes:
        data = encode(Batch(VERSION, self.node, self.epoch, self.seq, events))
        self._ring.append((self.seq, data))
        self._ring_bytes += len(data)
        while len(self._ring) > RING_BATCHES or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft()[1])
        self.seq += 1
        return data

    # ---- answers ----

    def replay(self, from_seq: int) -> Iterator[bytes]:
        """The batches from this number on that are still kept."""
        return iter([data for seq, data in self._ring if seq >= from_seq])

    def snapshot(self) -> Iterator[bytes]:
        """All that is held, in parts of bounded size; at least one part, which may be empty."""
        upto, said = self.seq - 1, False
        place: tuple[str, int] | None = None
        parts: list[bytes] = []
        keys = 0
        for layout, stride, packed in self.held():
            if parts and (place != (layout, stride) or keys >= MAX_KEYS):
                yield self._part(upto, place, parts)
                said, parts, keys = True, [], 0
            place = (layout, stride)
            parts.append(packed)
            keys += len(packed) // KEY_BYTES
        if parts or not said:
            yield self._part(upto, place, parts)

    def _part(self, upto: int, place: tuple[str, int] | None, parts: list[bytes]) -> bytes:
        layout, stride = place or ("", 0)
        events: list[Event] = [Stored("memory", layout, b"".join(parts), stride)] if parts else []
        return encode(Batch(VERSION, self.node, self.epoch, max(0, upto), events))
