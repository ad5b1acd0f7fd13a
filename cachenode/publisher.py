"""Tells the node's events to whoever listens, and answers their questions. Never waits for any of them.

Belongs to the server's thread: ``turn`` is called after each of its turns, and at least each second.
"""

import ipaddress
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import zmq

from cacheindex.events import BadEvent, Replay, decode_request
from cachenode.journal import Journal, Told

MAX_QUESTION_BYTES = 1024
MAX_ANSWERING = 16
TURN_QUESTIONS = 16
TURN_PARTS = 4
"""Parts of an answer sent in one turn, of bounded size each: a snapshot does not keep engines waiting."""
QUEUE = 10_000
_FRAMES = 3

Socket = zmq.Socket[bytes]


class Publisher:
    """Binds both endpoints. Raises OSError where that fails, ValueError for addresses that would be open to
    other machines without ``remote``. ``counters`` only grow."""

    def __init__(self, journal: Journal, endpoint: str, replay: str, *, remote: bool = False) -> None:
        for address in (endpoint, replay):
            check_address(address, remote=remote)
        self._journal = journal
        self._topic = journal.node.encode()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._pub = self._bound(zmq.PUB, endpoint)
        self._router = self._bound(zmq.ROUTER, replay)
        self._answers: deque[tuple[bytes, Iterator[bytes]]] = deque()
        self.counters: Counter[str] = Counter()

    def _bound(self, kind: int, endpoint: str) -> Socket:
        sock: Socket = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, QUEUE)
        sock.setsockopt(zmq.RCVHWM, QUEUE)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(
                error.errno, f"events cannot be published on {endpoint}: {error.strerror}"
            ) from error
        return sock

    @property
    def waker(self) -> int:
        """Readable when there may be a question."""
        return int(self._router.getsockopt(zmq.FD))

    def turn(self, now: float, told: Callable[[], Told]) -> bool:
        """Publishes what changed, goes on with answers; whether there is more to do."""
        for data in self._journal.take(now, told):
            self.counters["batches"] += 1
            with suppress(zmq.Again):
                self._pub.send_multipart([self._topic, data], zmq.NOBLOCK)
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._hear()
        for _ in range(len(self._answers)):
            self._go_on(*self._answers.popleft())
        return bool(self._answers)

    def _hear(self) -> None:
        for _ in range(TURN_QUESTIONS):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != _FRAMES or frames[1] != b"":
                self.counters["bad_questions"] += 1
                continue
            try:
                question = decode_request(frames[2])
            except BadEvent:
                self.counters["bad_questions"] += 1
                continue
            if len(self._answers) >= MAX_ANSWERING:
                self.counters["questions_dropped"] += 1
                continue
            self.counters["questions"] += 1
            journal = self._journal
            told = journal.replay(question.from_seq) if isinstance(question, Replay) else journal.snapshot()
            self._answers.append((frames[0], told))

    def _go_on(self, asker: bytes, told: Iterator[bytes]) -> None:
        """A few parts more of one answer. An asker who takes nothing gets no more."""
        for _ in range(TURN_PARTS):
            part = next(told, b"")
            try:
                self._router.send_multipart([asker, b"", part], zmq.NOBLOCK)
            except zmq.ZMQError:
                self.counters["answers_cut"] += 1
                return
            if not part:
                return
        self._answers.append((asker, told))

    def close(self) -> None:
        self._context.destroy(linger=0)


def check_address(address: str, *, remote: bool) -> None:
    """Raises ValueError, with words for the operator."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdigit()):
        raise ValueError(f"{address!r} is no ipc:// or tcp://host:port address")
    if not remote and not is_loopback(host.strip("[]")):
        text = (
            "would be open to other machines, without a key: set events.allow_remote if they are all trusted"
        )
        raise ValueError(f"{address!r} {text}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
