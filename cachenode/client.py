"""A scheduler's connection to the node: never in the way of the engine, and open again by itself.

Nothing here waits (but ``wait``, for as long as it is told) or raises for what the node does: a node that is
absent, slow, replaced or hostile is a node that holds nothing. Not for two threads at once.
"""

import mmap
import random
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from cachenode import shared, unix_path, wire
from cachenode.directory_view import HEADER_BYTES, DirectoryView
from cachenode.record import Layout, moved, realm

MAX_UNSENT = 8 * 1024 * 1024
"""More is not sent to a node that does not read."""
RETRY_S = (0.1, 5.0)
HELLO_S = 10.0
REPLY_S = 2.0
"""A node that leaves a request unanswered for so long is taken for gone, until it greets again."""
_REALMS = 1024
_MOST_ENDED = 64
_READ = 1024 * 1024

State = Literal["away", "greeting", "open"]


class NodeClient:
    """``names`` makes a session's name, a new one for each connection. ``layout`` and ``worker`` are the
    engine's. A request returns its ticket, or None while there is no connection; its reply comes with
    ``poll`` or ``wait``, a ``Failed`` with code "lost" where the connection ended first."""

    def __init__(
        self,
        path: str,
        layout: Layout,
        worker: str,
        names: Callable[[], str],
        clock: Callable[[], float],
        *,
        mode: wire.Mode = "map",
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._path, self._layout, self._worker, self._mode = path, layout, worker, mode
        self._names, self._clock, self._jitter = names, clock, jitter
        self._fingerprint = layout.fingerprint()
        self._masks: dict[str, bytes] = {}
        self._state: State = "away"
        self._socket: socket.socket | None = None
        self._name = ""
        self._ended: list[str] = []
        self._told = 0
        self._view: DirectoryView | None = None
        self._retry_at, self._pause = float("-inf"), RETRY_S[0]
        self._hello_until = 0.0
        self._ticket = 0
        self._reset()
        self.boot = ""
        """The node's, of the last connection."""
        self.refusal = ""
        """Why the node does not take us, for people; "" where it does or is not there."""

    def _reset(self) -> None:
        self._frames = wire.Frames()
        self._unsent = bytearray()
        self._waiting: set[int] = set()
        self._asked: deque[tuple[int, float]] = deque()
        self._replies: deque[wire.Reply] = deque()

    @property
    def connected(self) -> bool:
        return self._state == "open"

    @property
    def session(self) -> str:
        """The open session, which workers join; "" without a connection."""
        return self._name if self._state == "open" else ""

    # ---- requests ----

    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int:
        """How many leading blocks of a prompt, from its start on, can be read now. Asks nobody: the node's
        directory is looked up in memory."""
        if self._view is None or self._state != "open":
            return 0
        return self._view.match(moved(keys, self._mask(adapter)), proofs)

    def reserve(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", parent: bytes = b"", *, skip: int = 0
    ) -> int | None:
        """See ``wire.Reserve``. Keys begin where the chunk of the first wanted block begins."""
        number = self._next()
        return self._send(wire.Reserve(number, first, keys, proofs, adapter, parent, skip), number)

    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None:
        """See ``wire.Lease``."""
        number = self._next()
        return self._send(wire.Lease(number, first, keys, proofs, adapter, skip), number)

    def commit(self, ids: list[int]) -> int | None:
        number = self._next()
        return self._send(wire.Commit(number, ids), number)

    def abort(self, ids: list[int]) -> int | None:
        number = self._next()
        return self._send(wire.Abort(number, ids), number)

    def release(self, ids: list[int]) -> int | None:
        number = self._next()
        return self._send(wire.Release(number, ids), number)

    def forget(self) -> int | None:
        number = self._next()
        return self._send(wire.Forget(number), number)

    def ping(self) -> int | None:
        number = self._next()
        return self._send(wire.Ping(number), number)

    def quiet(self, session: str) -> None:
        """None of our workers copies anything for this ended session: the node is told with the next hello,
        or with the next ``poll`` where a connection is open."""
        if session and session not in self._ended and len(self._ended) < _MOST_ENDED:
            self._ended.append(session)

    # ---- replies ----

    def poll(self) -> list[wire.Reply]:
        """Everything that came since, and the end of what will not come. Connects when it is time to."""
        if self._state == "away":
            if self._clock() >= self._retry_at and not self._replies:  # Those are the last connection's.
                self._connect()
        elif self._state == "greeting" and self._clock() > self._hello_until:
            self._lose()
        self._flush()
        self._receive()
        if self._is_stuck():  # After what has come was taken: nobody may have polled for long.
            self._pause = RETRY_S[1]
            self._lose()
        if self._state == "open" and self._ended:
            number = self._next()
            if self._send(wire.Quiet(number, self._ended), number) is not None:
                self._ended = []
            self._waiting.discard(number)
        replies = list(self._replies)
        self._replies.clear()
        return replies

    def wait(self, ticket: int, seconds: float) -> wire.Reply | None:
        """This ticket's reply, waiting for it; others stay for ``poll``. None where it does not come in
        time: then it may still come with ``poll``."""
        end = self._clock() + seconds
        while True:
            self._flush()
            self._receive()
            for reply in self._replies:
                if reply.id == ticket:
                    self._replies.remove(reply)
                    return reply
            left = end - self._clock()
            if ticket not in self._waiting or left <= 0 or self._socket is None:
                return None
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            waiter = select.poll()
            waiter.register(self._socket, wanted)
            waiter.poll(1000 * left)

    def _is_stuck(self) -> bool:
        """Whether the node has not answered for so long that it is taken for gone."""
        while self._asked and self._asked[0][0] not in self._waiting:
            self._asked.popleft()
        return bool(self._asked) and self._clock() - self._asked[0][1] > REPLY_S

    def close(self) -> None:
        """Ends the session; the client connects no more."""
        self._lose()
        self._retry_at = float("inf")

    # ---- the connection ----

    def _connect(self) -> None:
        self._reset()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._path)
            if not unix_path.is_ours(sock):
                raise PermissionError("the node is another user's")
        except OSError:
            sock.close()
            self._later()
            return
        self._socket, self._state = sock, "greeting"
        self._name = self._names()
        self._hello_until = self._clock() + HELLO_S
        number, self._told = self._next(), len(self._ended)
        hello = wire.Hello(
            id=number,
            version=wire.VERSION,
            role="scheduler",
            session=self._name,
            worker=self._worker,
            rank=0,
            layout=self._layout,
            mode=self._mode,
            ended=self._ended,
        )
        self._unsent += wire.frame(hello)

    def _later(self) -> None:
        """Try again after a pause, longer each time, of random length so that engines do not come at once."""
        self._retry_at = self._clock() + self._pause * (0.5 + self._jitter() / 2)
        self._pause = min(RETRY_S[1], 2 * self._pause)

    def _lose(self) -> None:
        """Without a connection; what was asked is answered as lost."""
        if self._socket is not None:
            self._socket.close()
            self._later()
        self._socket, self._state = None, "away"
        self._view = None
        for ticket in sorted(self._waiting):
            self._replies.append(wire.Failed(ticket, self.boot, "lost", "the connection to the node ended"))
        self._waiting.clear()
        self._unsent.clear()

    def _next(self) -> int:
        self._ticket += 1
        return self._ticket

    def _send(self, request: wire.Request, number: int) -> int | None:
        if self._state != "open":
            return None
        if len(self._unsent) > MAX_UNSENT:
            self._lose()  # Rather than leave out a release: the node then settles the session as a whole.
            return None
        try:
            self._unsent += wire.frame(request)
        except ValueError:
            return None
        self._waiting.add(number)
        self._asked.append((number, self._clock()))
        self._flush()
        return number if self._state == "open" else None

    def _flush(self) -> None:
        while self._unsent and self._socket is not None:
            try:
                sent = self._socket.send(self._unsent[:_READ])
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            del self._unsent[:sent]

    def _receive(self) -> None:
        while self._socket is not None:
            descriptors: list[int] = []
            try:
                if self._state == "greeting":
                    data, descriptors, _, _ = socket.recv_fds(self._socket, _READ, 4)
                else:
                    data = self._socket.recv(_READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                shared.close(descriptors)
                self._lose()
                return
            try:
                bodies = self._frames.feed(data)
                for body in bodies:
                    self._take(wire.reply(body), descriptors)
            except (wire.BadFrame, ValueError, OSError):
                self._lose()
            finally:
                shared.close(descriptors)

    def _take(self, reply: wire.Reply, descriptors: Sequence[int]) -> None:
        if self._state == "greeting":
            if isinstance(reply, wire.Failed):
                self.refusal = reply.message
                self._pause = RETRY_S[1]
                self._lose()
            elif isinstance(reply, wire.Welcome):
                self._welcome(reply, descriptors)
            return
        if isinstance(reply, wire.Failed) and reply.fatal:
            self._lose()
        elif reply.id in self._waiting:
            self._waiting.discard(reply.id)
            self._replies.append(reply)

    def _welcome(self, welcome: wire.Welcome, descriptors: Sequence[int]) -> None:
        """Raises OSError or ValueError where what came with it is no directory. The caller closes it."""
        if len(descriptors) != 1 or welcome.fingerprint != self._fingerprint:
            raise ValueError("a welcome without the directory, or for another layout")
        if welcome.directory_bytes < HEADER_BYTES:
            raise ValueError("a directory without its head")
        memory: mmap.mmap = shared.map_fd(descriptors[0], welcome.directory_bytes, write=False)
        self._view = DirectoryView(memoryview(memory))
        self._state, self.boot, self.refusal = "open", welcome.boot, ""
        self._pause = RETRY_S[0]
        del self._ended[: self._told]

    def _mask(self, adapter: str) -> bytes:
        mask = self._masks.get(adapter)
        if mask is None:
            if len(self._masks) >= _REALMS:
                self._masks.clear()
            mask = self._masks[adapter] = realm(self._fingerprint, adapter)
        return mask
