"""Fakes of cache nodes: one as a model with its truth, and one that speaks over real sockets."""

import random
import threading
from collections import deque
from typing import Any

import zmq

from cacheindex.events import (
    VERSION,
    Batch,
    Cleared,
    Event,
    Heartbeat,
    Removed,
    Replay,
    Snapshot,
    Stored,
    Tier,
    decode_request,
    encode,
)
from cacheindex.keys import pack_keys
from cacheindex.table import Slot

MEMORY: Tier = "memory"
LAYOUTS = (("one", 16), ("two", 32), ("three", 64))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class ModelNode:
    """A node's holdings and its batches, in one life after the other. ``said`` are the batches that its
    ring still has."""

    def __init__(self, name: str, ring: int = 64, part: int = 8) -> None:
        self.name, self.life, self.part = name, 0, part
        self.said: deque[Batch] = deque(maxlen=ring)
        self.held: dict[Slot, set[bytes]] = {}
        self.serves: list[tuple[str, str]] = []
        self.boot()

    def boot(self) -> Batch:
        """A new life, empty, which begins with a heartbeat."""
        self.life += 1
        self.seq = 0
        self.said.clear()
        self.held.clear()
        return self.beat()

    def batch(self, *events: Event) -> Batch:
        batch = Batch(VERSION, self.name, f"life {self.life}", self.seq, list(events))
        self.seq += 1
        self.said.append(batch)
        return batch

    def beat(self) -> Batch:
        return self.batch(Heartbeat(self.seq, {"memory": 100}, {"memory": 2.0}, self.serves))

    def slot(self, layout: str, stride: int) -> Slot:
        return Slot(self.name, MEMORY, layout, stride)

    def store(self, keys: list[bytes], layout: str = "one", stride: int = 16) -> Batch:
        self.held.setdefault(self.slot(layout, stride), set()).update(keys)
        return self.batch(Stored(MEMORY, layout, pack_keys(keys), stride))

    def remove(self, keys: list[bytes], layout: str = "one", stride: int = 16) -> Batch:
        self.held.get(self.slot(layout, stride), set()).difference_update(keys)
        return self.batch(Removed(MEMORY, layout, pack_keys(keys), stride))

    def clear(self, layout: str = "one", stride: int = 16) -> Batch:
        self.held.pop(self.slot(layout, stride), None)
        return self.batch(Cleared(MEMORY, layout, stride))

    def anything(self, rng: random.Random) -> Batch:
        """A batch as a working node may say it: it stores what it does not hold, removes what it holds."""
        layout, stride = rng.choice(LAYOUTS)
        held = self.held.setdefault(self.slot(layout, stride), set())
        draw = rng.random()
        if draw < 0.02:
            return self.clear(layout, stride)
        if draw < 0.15:
            return self.beat()
        if draw < 0.45 and held:
            return self.remove(rng.sample(sorted(held), rng.randint(1, len(held))), layout, stride)
        fresh = [one for one in map(key, rng.sample(range(60), 12)) if one not in held]
        return self.store(fresh, layout, stride) if fresh else self.beat()

    def answers(self, request: Replay | Snapshot) -> list[Batch]:
        if isinstance(request, Replay):
            return [batch for batch in self.said if batch.seq >= request.from_seq]
        parts: list[Event] = []
        for slot, keys in self.held.items():
            order = sorted(keys)
            for start in range(0, len(order), self.part):
                packed = pack_keys(order[start : start + self.part])
                parts.append(Stored(slot.tier, slot.layout, packed, slot.stride))
        upto, epoch = self.seq - 1, f"life {self.life}"
        return [Batch(VERSION, self.name, epoch, upto, [part]) for part in parts] or [
            Batch(VERSION, self.name, epoch, upto, [])
        ]


class NodePublisher:
    """A ``ModelNode`` on real sockets, which answers questions in a thread of its own. ``asked`` are the
    questions so far; while ``deaf`` none is answered."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, replay: str, name: str = "n") -> None:
        self.model = ModelNode(name)
        self.asked: list[Replay | Snapshot] = []
        self.deaf = False
        self.pub = context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.pub.bind(endpoint)
        self.router = context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.bind(replay)
        self.lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def wait_subscribed(self) -> None:
        message = b""
        while message[:1] != b"\x01":
            assert self.pub.poll(5000), "nobody subscribed within 5 s"
            message = self.pub.recv()

    def say(self, batch: Batch) -> None:
        self.raw([self.model.name.encode(), encode(batch)])

    def raw(self, frames: list[bytes]) -> None:
        self.pub.send_multipart(frames)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self.pub.close(linger=0)
        self.router.close(linger=0)

    def _answer(self) -> None:
        while self._open:
            if not self.router.poll(20):
                continue
            client, empty, question = self.router.recv_multipart()
            assert empty == b""
            request = decode_request(question)
            self.asked.append(request)
            if self.deaf:
                continue
            with self.lock:
                answers = self.model.answers(request)
            for batch in answers:
                self.router.send_multipart([client, b"", encode(batch)])
            self.router.send_multipart([client, b"", b""])
