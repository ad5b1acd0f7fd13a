"""Publishes KV events over ZMQ as vLLM does: PUB for the stream, ROUTER for replays.

The stream's socket is an XPUB, the same on the wire, because it tells how many listen.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import zmq

from loadtest.sim.cache import CacheEvent
from loadtest.sim.clock import Clock
from loadtest.sim.config import SimConfig
from loadtest.sim.faults import FaultBox
from loadtest.sim.wire import END_SEQ, EventEncoder

Frames = tuple[bytes, bytes, bytes]

_HIGH_WATER = 100_000
_BIND_DEADLINE_S = 5.0


class Publisher:
    """One stream of numbered batches. Lives on one event loop; sending never blocks.

    ``open`` and ``close`` may alternate: that is an engine's restart. ``next_seq`` is the number
    the next batch gets and survives ``close``; the replay buffer does not.
    """

    def __init__(self, config: SimConfig, *, encoder: EventEncoder, faults: FaultBox, clock: Clock) -> None:
        self.endpoint = config.events_endpoint
        self.replay_endpoint = config.replay_endpoint
        self.next_seq = 0
        self.replays = 0  # requests answered
        self.subscribers = 0
        self._topic = config.topic.encode()
        self._encoder = encoder
        self._faults = faults
        self._clock = clock
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._outbox: deque[tuple[float, Frames]] = deque()
        self._held_back: Frames | None = None
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the sockets. Endpoints with port 0 or ``*`` as port get their real one here."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.set_hwm(_HIGH_WATER)
        self._pub.linger = 0
        if binds(self.endpoint):
            self.endpoint = await _bind(self._pub, self.endpoint)
        else:
            self._pub.connect(self.endpoint)
        asyncio.get_running_loop().add_reader(self._pub.FD, self._count_subscribers)
        self._count_subscribers()
        if self.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.linger = 0
            self.replay_endpoint = await _bind(self._replay, self.replay_endpoint)
            asyncio.get_running_loop().add_reader(self._replay.FD, self._serve_replays)
            self._serve_replays()
        self._sender = asyncio.get_running_loop().create_task(self._send_outbox(), name="sim-events")

    async def close(self) -> None:
        """Close the sockets at once, as a killed process does. What was not sent is lost."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
            self._sender = None
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.FD)
            self._replay.close(linger=0)
            self._replay = None
        if self._pub is not None:
            asyncio.get_running_loop().remove_reader(self._pub.FD)
            self._pub.close(linger=0)
            self._pub = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._outbox.clear()
        self._buffer.clear()
        self._held_back = None
        self.subscribers = 0

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Give the batch the next number, keep it for replays, send it as the faults allow."""
        if self._pub is None or not events:
            return
        seq = self.next_seq
        self.next_seq += 1
        payload = self._encoder.payload(time.time(), events)
        self._buffer.append((seq, payload))
        faults = self._faults
        if faults.take("garbage_events"):
            self._enqueue(self._garbage(seq))
        if faults.lot(faults.now.drop_events):
            return
        frames = (self._topic, seq.to_bytes(8, "big"), payload)
        if self._held_back is None and faults.lot(faults.now.reorder_events):
            self._held_back = frames
            return
        self._enqueue(frames)
        if faults.lot(faults.now.duplicate_events):
            self._enqueue(frames)
        if self._held_back is not None:
            held, self._held_back = self._held_back, None
            self._enqueue(held)

    def faults_changed(self) -> None:
        """Send what waited for a fault that may be over."""
        if self._held_back is not None and self._faults.now.reorder_events == 0:
            held, self._held_back = self._held_back, None
            self._enqueue(held)
        self._wake.set()

    def _enqueue(self, frames: Frames) -> None:
        delay = self._faults.now.delay_events
        if not self._outbox and delay <= 0 and not self._faults.now.stall_events:
            self._send(frames)
            return
        self._outbox.append((self._clock.now() + delay, frames))
        self._wake.set()

    def _send(self, frames: Frames) -> None:
        if self._pub is not None:
            self._pub.send_multipart(frames, zmq.NOBLOCK)  # PUB drops rather than blocks
            self._count_subscribers()  # sending consumes the descriptor's signal

    def _count_subscribers(self) -> None:
        # Descriptors of ZMQ sockets only signal changes, so read until nothing is left.
        while self._pub is not None:
            try:
                message = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.subscribers += {1: 1, 0: -1}.get(message[0] if message else -1, 0)

    async def _send_outbox(self) -> None:
        while True:
            while self._outbox and not self._faults.now.stall_events:
                due, frames = self._outbox[0]
                await self._clock.sleep(due - self._clock.now())
                if self._faults.now.stall_events:
                    break
                self._outbox.popleft()
                self._send(frames)
            self._wake.clear()
            await self._wake.wait()

    def _garbage(self, seq: int) -> Frames:
        # By turns: no msgpack, msgpack of another shape, a sequence of the wrong length.
        shapes: tuple[Frames, ...] = (
            (self._topic, seq.to_bytes(8, "big"), b"\xc1\xff\x00garbage"),
            (self._topic, seq.to_bytes(8, "big"), b"\x93\x01\x02\x03"),
            (self._topic, b"\x01", b""),
        )
        return shapes[seq % len(shapes)]

    def _serve_replays(self) -> None:
        while self._replay is not None:
            try:
                request = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(request) == 3:
                self.replays += 1
                self._answer_replay(self._replay, request[0], int.from_bytes(request[2], "big"))

    def _answer_replay(self, router: "zmq.Socket[bytes]", client: bytes, start: int) -> None:
        for seq, payload in self._buffer:
            if seq >= start:
                router.send_multipart((client, b"", self._topic, seq.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", END_SEQ, b""))


def binds(endpoint: str) -> bool:
    """vLLM's rule: wildcards, ipc and inproc bind; everything else connects."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


async def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    # "*" means loopback here: a simulated engine is never reachable from outside. Closed sockets
    # free their address a moment later, so a restart tries again for a while.
    address = endpoint.replace("tcp://*", "tcp://127.0.0.1", 1)
    deadline = time.monotonic() + _BIND_DEADLINE_S
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)
        else:
            return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
