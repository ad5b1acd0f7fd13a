"""The node's control socket: one thread that owns all metadata, and never waits for anybody.

Connections are bounded in number, in what they let wait, and in the time they may take to say hello. Other
threads hand it work with ``call``.
"""

import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cachenode import unix_path, wire
from cachenode.sessions import Answer, Moved, Peer, Sessions
from cachenode.store import Store

MAX_CONNECTIONS = 1024
MAX_UNSENT = 64 * 1024 * 1024
"""A connection that lets so many bytes wait is cut off."""
HELLO_S = 10.0
TURN_BYTES = 256 * 1024
TURN_REQUESTS = 64
TICK_S = 1.0

log = logging.getLogger(__name__)

T = TypeVar("T")


class Memory(msgspec.Struct, frozen=True):
    """What is handed out: descriptors, and the arena as this process maps it."""

    arena_fd: int
    arena: memoryview
    directory_fd: int
    directory_bytes: int


class _Connection:
    def __init__(self, sock: socket.socket, peer: Peer, deadline: float) -> None:
        self.sock, self.peer, self.deadline = sock, peer, deadline
        self.frames = wire.Frames()
        self.waiting: deque[bytes] = deque()
        """Request bodies that were not handled yet."""
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        self.unsent_bytes = 0
        self.ending = False
        """Closed once what is unsent is sent."""


class Server:
    """Listens from the start (raises what ``unix_path.listen`` raises). ``ticked`` is called by the
    owner thread after every turn, with the time: there events go out. It says whether there
    is more to do at once."""

    def __init__(
        self,
        path: Path,
        store: Store,
        memory: Memory,
        *,
        node: str,
        boot: str,
        ticked: Callable[[float], bool] = lambda _now: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._store, self._memory = path, store, memory
        self._ticked, self._clock = ticked, clock
        sizes = (len(memory.arena), memory.directory_bytes)
        self.sessions = Sessions(store, node, boot, sizes)
        self.boot = boot
        self.turns = 0
        self.last_turn = clock()
        self.errors = 0
        """Faults of our own while handling a request; should be 0."""
        self._listener = unix_path.listen(path)
        self._identity = unix_path.identity(path)
        self._selector = selectors.DefaultSelector()
        self._ear, self._mouth = socket.socketpair()
        for end in (self._ear, self._mouth):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._connections: dict[int, _Connection] = {}
        self._by_peer: dict[Peer, _Connection] = {}
        self._processes: dict[int, int] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = self._more = self._deaf = False
        self._ticked_at = float("-inf")

    def wake_on(self, descriptor: int) -> None:
        """Take a turn when this is readable; ``ticked`` reads from it."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    # ---- from any thread ----

    def call(self, work: Callable[[], T], timeout_s: float = 5.0) -> T:
        """Has the owner thread do this and returns its result. Raises what it raises, and TimeoutError where
        the thread does not come to it."""
        future: Future[T] = Future()
        self._calls.append((work, future))
        self._wake()
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # What nobody waits for any more is not done later.

    def stop(self) -> None:
        """``run`` returns soon."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # Full: it wakes anyway. Closed: there is nobody to wake.
            self._mouth.send(b"\0")

    # ---- the owner thread ----

    def run(self) -> None:
        """Serves until ``stop``."""
        while not self._stopping:
            self.step(TICK_S)

    def step(self, timeout_s: float) -> None:
        """One turn: waits for at most so long, does a bounded share of what there is."""
        busy = self._store.work() or self._more or any(c.waiting for c in self._connections.values())
        for key, events in self._selector.select(0.0 if busy or self._calls else timeout_s):
            self._ready(key, events)
        for connection in list(self._connections.values()):
            if connection.waiting:
                self._handle(connection)
        while self._calls:
            work, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                _answer(work, future)
        now = self._clock()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            self._cut_silent(now)
        self._more = self._ticked(now)
        self.turns += 1
        self.last_turn = now

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._ear:
            with suppress(BlockingIOError):
                self._ear.recv(4096)
        elif isinstance(key.data, int):
            self._exited(key.data)
        elif key.fd in self._connections:
            connection = self._connections[key.fd]
            if events & selectors.EVENT_READ and not connection.waiting:  # Else the sender waits too.
                self._read(connection)
            if events & selectors.EVENT_WRITE and key.fd in self._connections:
                self._send(connection)

    def _accept(self) -> None:
        for _ in range(unix_path.BACKLOG):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._deaf:
                    self._deaf = True  # Until the next tick, or it would be ready again and again.
                    self._selector.unregister(self._listener)
                return
            pid, uid = unix_path.peer(sock)
            if uid not in (0, os.geteuid()) or len(self._connections) >= MAX_CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)
            connection = _Connection(sock, Peer(pid), self._clock() + HELLO_S)
            self._connections[sock.fileno()] = connection
            self._by_peer[connection.peer] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(TURN_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        if connection.ending:
            return
        try:
            connection.waiting.extend(connection.frames.feed(data))
        except wire.BadFrame as error:
            failed = wire.Failed(-1, self.boot, "bad_frame", str(error), fatal=True)
            self._reply(connection, failed, wire.frame(failed), [])

    def _handle(self, connection: _Connection) -> None:
        """A bounded number of requests; the rest waits for the next turn, and so does the sender."""
        for _ in range(TURN_REQUESTS):
            if not connection.waiting or connection.ending:
                break
            body = connection.waiting.popleft()
            descriptors: list[int] = []
            try:
                answer = self.sessions.handle(connection.peer, body)
                done = self._copied(answer) if isinstance(answer, Moved) else answer
                if done.memory != "none":
                    descriptors = self._descriptors(connection.peer, done.memory)
                data = wire.frame(done.reply)
            except Exception as error:  # The root of every request: a fault of ours must not end the node.
                self.errors += 1
                log.exception("a request failed with %s", type(error).__name__)
                text = "the node could not answer; its log says more"
                done = Answer(wire.Failed(-1, self.boot, "internal", text, fatal=True))
                data, descriptors = wire.frame(done.reply), []
            self._reply(connection, done.reply, data, descriptors)
        if connection.sock.fileno() in self._connections:
            self._watch(connection)

    def _copied(self, moved: Moved) -> Answer:
        arena = self._memory.arena
        if moved.data is None:
            data = b"".join(arena[offset : offset + length] for offset, length in moved.passages)
            return Answer(wire.Data(moved.id, self.boot, data))
        at = 0
        for offset, length in moved.passages:
            arena[offset : offset + length] = moved.data[at : at + length]
            at += length
        return Answer(wire.Done(moved.id, self.boot, 1))

    def _descriptors(self, peer: Peer, memory: str) -> list[int]:
        """What goes with a welcome; from now on the end of a process that maps the arena is watched."""
        if memory == "directory":
            return [self._memory.directory_fd]
        if peer.pid not in self._processes:
            try:
                fd = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                self.sessions.exited(peer.pid)
                return []
            self._processes[peer.pid] = fd
            self._selector.register(fd, selectors.EVENT_READ, peer.pid)
        return [self._memory.arena_fd, self._memory.directory_fd]

    def _exited(self, pid: int) -> None:
        fd = self._processes.pop(pid)
        self._selector.unregister(fd)
        os.close(fd)
        # Its connections are closed by the kernel, perhaps read later: they end first.
        for connection in [one for one in self._connections.values() if one.peer.pid == pid]:
            self._close(connection)
        self.sessions.exited(pid)

    def _reply(self, connection: _Connection, reply: wire.Reply, data: bytes, descriptors: list[int]) -> None:
        connection.unsent.append((data, descriptors))
        connection.unsent_bytes += len(data)
        if isinstance(reply, wire.Failed) and reply.fatal:
            connection.ending = True
        if connection.unsent_bytes > MAX_UNSENT:
            self._close(connection)
        else:
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        while connection.unsent:
            data, descriptors = connection.unsent[0]
            try:
                if descriptors:
                    sent = socket.send_fds(connection.sock, [data], descriptors)
                else:
                    sent = connection.sock.send(data)
            except BlockingIOError:
                break
            except OSError:
                self._close(connection)
                return
            connection.unsent_bytes -= sent
            if sent < len(data):
                connection.unsent[0] = (data[sent:], [])
            else:
                connection.unsent.popleft()
        if connection.ending and not connection.unsent:
            self._close(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Reads only while nothing that was read waits and all was sent: who does not take its replies is
        not listened to."""
        events = selectors.EVENT_READ
        if connection.unsent or connection.waiting:
            events = selectors.EVENT_WRITE if connection.unsent else 0
        if events and self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _cut_silent(self, now: float) -> None:
        if self._deaf:
            self._deaf = False
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for connection in list(self._connections.values()):
            if connection.peer.role is None and now > connection.deadline:
                self._close(connection)
        for pid in self._processes.keys() - self.sessions.mapping:
            fd = self._processes.pop(pid)
            self._selector.unregister(fd)
            os.close(fd)

    def _close(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is None:
            return
        connection.waiting.clear()
        connection.unsent.clear()
        del self._by_peer[connection.peer]
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for other in self.sessions.gone(connection.peer):
            if other in self._by_peer:
                self._close(self._by_peer[other])

    def close(self) -> None:
        """After ``run`` has returned: the path goes first, so that nobody connects to a dying node."""
        unix_path.remove(self.path, self._identity)
        for connection in list(self._connections.values()):
            self._close(connection)
        for _, future in self._calls:
            future.cancel()
        for fd in self._processes.values():
            os.close(fd)
        self._selector.close()
        for end in (self._listener, self._ear, self._mouth):
            end.close()

    def reachable(self) -> bool:
        """Whether engines that look for the path find this server there."""
        try:
            return unix_path.identity(self.path) == self._identity
        except OSError:
            return False

    def connections(self) -> int:
        return len(self._connections)


def _answer(work: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(work())
    except Exception as error:  # It belongs to whoever asked; raised again there.
        future.set_exception(error)
