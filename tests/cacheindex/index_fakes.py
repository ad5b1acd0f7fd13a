"""Fakes for the tests of cacheindex: an engine's cache as a model, its wire forms, a real publisher."""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from cacheindex.engine_events import EngineBatch, parse
from cacheindex.keys import Namespace, prompt_keys

SECRET = b"a secret of the tests"
MODEL = "model"
END = b"\xff" * 8

_ARRAY_FIELDS = {
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
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def keys_of(tokens: Sequence[int], adapter: str = "", salt: str = "") -> list[bytes]:
    return prompt_keys(Namespace(MODEL, adapter, salt).root(SECRET), tokens)


def stored(hashes: list[Any], parent: Any, tokens: Sequence[int], size: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[Any], medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def payload(events: list[dict[str, Any]], form: str = "map", timestamp: float = 1.0) -> bytes:
    if form == "map":
        return msgspec.msgpack.encode([timestamp, events, 0])
    arrays = [[event["type"], *map(event.get, _ARRAY_FIELDS[event["type"]])] for event in events]
    return msgspec.msgpack.encode([timestamp, arrays])


def frames(seq: int, data: bytes, topic: bytes = b"kv") -> list[bytes]:
    return [topic, seq.to_bytes(8, "big"), data]


def batch(*events: dict[str, Any], seq: int = 0, form: str = "map") -> EngineBatch:
    return parse(frames(seq, payload(list(events), form)))


class ModelEngine:
    """A cache of engine blocks with vLLM's habits: blocks are evicted least recently used first,
    several blocks may hold one hash and each is announced, a prompt's last block is computed anew."""

    def __init__(self, block_size: int, capacity: int, form: str = "int") -> None:
        self.block_size, self.capacity, self.form = block_size, capacity, form
        self.blocks: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._next = 0

    def name(self, prefix: tuple[int, ...]) -> Any:
        number = hash((self.block_size, prefix)) & (2**64 - 1)
        return {"int": number, "bytes": number.to_bytes(32, "big"), "str": f"{number:x}"}[self.form]

    def held(self) -> Counter[tuple[int, ...]]:
        return Counter(self.blocks.values())

    def reach(self, tokens: Sequence[int], stride: int) -> int:
        """Tokens of this prompt the cache holds, rounded down to ``stride``."""
        held, size, end = self.held(), self.block_size, 0
        while end + size <= len(tokens) and held[tuple(tokens[: end + size])]:
            end += size
        return end - end % stride

    def compute(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The events of serving this prompt."""
        events: list[dict[str, Any]] = []
        size = self.block_size
        full = len(tokens) // size
        hit = min(self.reach(tokens, size), (len(tokens) - 1) // size * size) // size
        pinned = {tuple(tokens[: size * (index + 1)]) for index in range(full)}
        for number, prefix in list(self.blocks.items()):
            if prefix in pinned:
                self.blocks.move_to_end(number)
        room = len({prefix for prefix in self.blocks.values() if prefix in pinned})
        full = min(full, hit + max(0, self.capacity - room - hit))
        if full <= hit:
            return events
        while len(self.blocks) + full - hit > self.capacity:
            _, prefix = self.blocks.popitem(last=False)
            events.append(removed([self.name(prefix)]))
        hashes = []
        for index in range(hit, full):
            prefix = tuple(tokens[: size * (index + 1)])
            self.blocks[self._next] = prefix
            self._next += 1
            hashes.append(self.name(prefix))
        parent = self.name(tuple(tokens[: size * hit])) if hit else None
        events.append(stored(hashes, parent, tokens[size * hit : size * full], size))
        return events

    def clear(self) -> list[dict[str, Any]]:
        self.blocks.clear()
        return [CLEARED]


class Publisher:
    """A real ZMQ publisher with a replay socket, in one life of an engine."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        endpoint: str,
        replay: str | None = None,
        *,
        first_seq: int = 0,
        ring: int = 10_000,
        connect: bool = False,
        form: str = "map",
    ) -> None:
        self.seq, self.form = first_seq, form
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.asked: list[int] = []
        self.pub = context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.SNDHWM, 100_000)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # A second subscriber shows while the first is there.
        (self.pub.connect if connect else self.pub.bind)(endpoint)
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        if replay is not None:
            self.router.bind(replay)
        self._open = True
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def wait_subscribed(self) -> None:
        """Until the next subscription; what is said after it is heard."""
        message = b""
        while message[:1] != b"\x01":
            assert self.pub.poll(5000), "nobody subscribed within 5 s"
            message = self.pub.recv()

    def say(self, events: list[dict[str, Any]], *, lost: bool = False) -> None:
        data = payload(events, self.form, time.time())
        with self._lock:
            self.ring.append((self.seq, data))
            seq, self.seq = self.seq, self.seq + 1
        if not lost:
            self.pub.send_multipart(frames(seq, data))

    def raw(self, parts: list[bytes]) -> None:
        self.pub.send_multipart(parts)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self.pub.close(linger=0)
        self.router.close(linger=0)

    def _answer(self) -> None:
        while self._open:
            if not self.router.poll(20):
                continue
            client, _, start = self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            with self._lock:
                answers = [(seq, data) for seq, data in self.ring if seq >= self.asked[-1]]
            for seq, data in answers:
                self.router.send_multipart([client, b"", *frames(seq, data)])
            self.router.send_multipart([client, b"", b"", END, b""])


def eventually(check: Callable[[], object], what: str, deadline: float = 8.0) -> None:
    """Wait for a condition, looking often."""
    until = time.monotonic() + deadline
    pause = threading.Event()
    while not check():
        assert time.monotonic() < until, f"not within {deadline} s: {what}"
        pause.wait(0.005)


def endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"
