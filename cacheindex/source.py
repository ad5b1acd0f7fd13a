"""The sockets of one event stream: a subscription, what becomes of its connections, and answers to questions.

Belongs to the hub's thread. Nothing here waits: sockets are read until they have no more or this
turn's budget is spent, lost connections are opened anew later. What the frames mean is the business of
the stream's dialect (``engine_source``, ``node_source``), which listens.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from cacheindex.table import Table

TURN_MESSAGES = 64
TURN_SECONDS = 0.002
_MAX_FRAMES = 5
_ANSWER_QUEUE = 16_384
_REOPEN_S = (0.1, 2.0)

Socket = zmq.Socket[bytes]


class Address(msgspec.Struct, frozen=True):
    """A publisher's ``endpoint``, connected to or with ``bind`` bound, the ``topic`` its messages begin
    with, where it answers questions, and the largest frame that is taken from it, in bytes."""

    endpoint: str
    answers: str | None
    bind: bool
    topic: str
    frame_bytes: int


class Surroundings(msgspec.Struct, frozen=True):
    """What all sources of a hub share."""

    table: Table
    context: zmq.Context[Socket]
    secret: bytes
    clock: Callable[[], float]
    wall: Callable[[], float]
    queue: int


class Listener(Protocol):
    """What a line tells of."""

    def connected(self, now: float) -> None: ...
    def lost(self, now: float) -> None: ...
    def heard(self, frames: list[bytes], now: float) -> None: ...
    def answered(self, frames: list[bytes], now: float) -> None: ...


class Line:
    """``sockets_changed`` is set whenever ``sockets`` differs from before; the hub clears it.
    ``trouble`` says why there is no subscription, "" where there is one. ``unasked`` counts questions
    that could not be sent, by the reason."""

    def __init__(self, address: Address, around: Surroundings, listener: Listener) -> None:
        self.sockets_changed = True
        self.trouble = ""
        self.unasked: dict[str, int] = {}
        self._address, self._around, self._listener = address, around, listener
        self._sub: Socket | None = None
        self._monitor: Socket | None = None
        self._dealer: Socket | None = None
        self._connections = 0
        self._open_at = float("-inf")
        self._opened_at = 0.0
        self._pause = _REOPEN_S[0]

    @property
    def sockets(self) -> list[Socket]:
        return [socket for socket in (self._monitor, self._dealer, self._sub) if socket is not None]

    @property
    def connected(self) -> bool:
        return self._connections > 0

    def step(self, ready: Sequence[Socket], now: float, *, reading: bool = True) -> None:
        """Bounded work on sockets that have something, connections before what they carried. Without
        ``reading``, connections only."""
        if self._monitor is not None and self._monitor in ready:
            self._read_monitor(self._monitor, now)
        if reading and self._dealer is not None and self._dealer in ready:
            self._read_answers(self._dealer)
        if reading and self._sub is not None and self._sub in ready:
            self._read_sub(self._sub)

    def tick(self, now: float) -> None:
        """Subscribes where that is due."""
        if self._sub is None and now >= self._open_at:
            self._open(now)

    def ask(self, question: list[bytes]) -> None:
        """Ends the answers to an earlier question. One that cannot be sent is counted, and stays
        without an answer."""
        self.end_answers()
        endpoint = self._address.answers
        if endpoint is None:
            return
        dealer: Socket = self._around.context.socket(zmq.DEALER)
        try:
            self._configure(dealer, endpoint, _ANSWER_QUEUE)
            dealer.connect(endpoint)
            dealer.send_multipart(question, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            self.unasked[error.strerror] = self.unasked.get(error.strerror, 0) + 1
            return
        self._dealer = dealer
        self.sockets_changed = True

    def end_answers(self) -> None:
        """Nothing more is wanted of the last question."""
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
            self.sockets_changed = True

    def close(self) -> None:
        self._close_sub()
        self.end_answers()

    # ---- the subscription ----

    def _open(self, now: float) -> None:
        address, around = self._address, self._around
        sub: Socket = around.context.socket(zmq.SUB)
        monitor: Socket | None = None
        try:
            self._configure(sub, address.endpoint, around.queue)
            sub.setsockopt(zmq.RECONNECT_IVL, 100)
            sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            sub.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # Finds a peer that left without a word.
            sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
            sub.setsockopt(zmq.SUBSCRIBE, address.topic.encode())
            # Before connecting, so that no connection goes unseen.
            monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            monitor.setsockopt(zmq.LINGER, 0)
            (sub.bind if address.bind else sub.connect)(address.endpoint)
        except zmq.ZMQError as error:
            if monitor is not None:
                sub.disable_monitor()
                monitor.close()
            sub.close(linger=0)
            self.trouble = f"cannot {'bind' if address.bind else 'connect'}: {error.strerror}"
            self._postpone(now)
            return
        self.trouble = ""
        self._sub, self._monitor, self._opened_at = sub, monitor, now
        self.sockets_changed = True

    def _close_sub(self) -> None:
        if self._sub is not None and self._monitor is not None:
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._sub.close(linger=0)
            self._sub = self._monitor = None
            self._connections = 0
            self.sockets_changed = True

    def _postpone(self, now: float) -> None:
        """Open again soon, later each time while connections do not last."""
        short = now - self._opened_at < 1.0 or self._sub is None
        self._pause = min(2 * self._pause, _REOPEN_S[1]) if short else _REOPEN_S[0]
        self._open_at = now + self._pause

    def _read_monitor(self, monitor: Socket, now: float) -> None:
        for _ in range(TURN_MESSAGES):
            frames = _receive(monitor)
            if frames is None:
                return
            if parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connections += 1
                self._listener.connected(now)
            else:
                self._lost_connection(now)
                if self._sub is None:
                    return

    def _lost_connection(self, now: float) -> None:
        self._listener.lost(now)
        if not self._address.bind:
            # What the old connection still holds for us must not pass for the new epoch's.
            self._postpone(now)
            self._close_sub()
            return
        self._connections = max(0, self._connections - 1)
        if self._sub is not None:
            for _ in range(self._around.queue):
                if _receive(self._sub) is None:
                    break
        if self._connections:
            self._listener.connected(now)

    # ---- messages ----

    def _read_sub(self, sub: Socket) -> None:
        clock = self._around.clock
        until = clock() + TURN_SECONDS
        for _ in range(TURN_MESSAGES):
            frames = _receive(sub)
            if frames is None:
                return
            now = clock()
            self._listener.heard(frames, now)
            if now > until:
                return

    def _read_answers(self, dealer: Socket) -> None:
        clock = self._around.clock
        until = clock() + TURN_SECONDS
        for _ in range(TURN_MESSAGES):
            frames = _receive(dealer)
            if frames is None:
                return
            now = clock()
            self._listener.answered(frames, now)
            if self._dealer is not dealer or now > until:
                return  # The answer was the last one, or led to another question.

    def _configure(self, socket: Socket, endpoint: str, queue: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, queue)
        # A message larger than any we read ends the connection, instead of filling memory.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * self._address.frame_bytes)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)


def _receive(socket: Socket) -> list[bytes] | None:
    """One message, or None when there is none now. Frames beyond a few are read and dropped."""
    frames: list[bytes] = []
    with suppress(zmq.Again):
        frames.append(socket.recv(zmq.NOBLOCK))
        while socket.getsockopt(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            if len(frames) < _MAX_FRAMES:
                frames.append(frame)
    return frames or None
