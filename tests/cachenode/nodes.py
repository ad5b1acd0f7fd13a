"""A node's control server over a real socket, in a thread, and clients for it. For tests."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cachenode import wire
from cachenode.attachment import Attachment
from cachenode.client import NodeClient
from cachenode.record import Layout
from cachenode.server import Memory, Server
from hotprefix.processes import wait_until
from tests.cachenode.stores import Room, layout

BLOCK = 4096
_numbers = itertools.count()


class Node:
    """Ends with the ``with`` block; a fault of its own fails the test."""

    def __init__(self, path: Path, blocks: int = 64, boot: str = "boot-1") -> None:
        self.room = Room(blocks * BLOCK)
        self.path = path
        memory = Memory(
            self.room.arena_fd,
            memoryview(self.room.arena),
            self.room.directory_fd,
            os.fstat(self.room.directory_fd).st_size,
        )
        self.server = Server(path, self.room.store, memory, node="n", boot=boot)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        assert self.server.errors == 0
        self.room.store.check_integrity()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.server.stop()
            self._thread.join()
            self.server.close()

    def check(self) -> None:
        self.server.call(self.room.store.check_integrity)

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Waits until this is so in the owner thread."""
        assert wait_until(lambda: self.server.call(holds), 20.0)


def name() -> str:
    return f"session-of-test-{os.getpid()}-{next(_numbers)}"


def client(path: Path, of: Layout | None = None, mode: wire.Mode = "map") -> NodeClient:
    """Not connected yet."""
    return NodeClient(
        str(path), of or layout(BLOCK), "w", name, time.monotonic, mode=mode, jitter=lambda: 0.0
    )


def connect(made: NodeClient) -> NodeClient:
    def connected() -> bool:
        made.poll()
        return made.connected

    assert wait_until(connected, 20.0)
    return made


def attach(
    made: NodeClient, path: Path, rank: int = 0, of: Layout | None = None, mode: wire.Mode = "map"
) -> Attachment:
    found = Attachment.join(str(path), of or layout(BLOCK), "w", made.session, rank=rank, mode=mode)
    assert found is not None
    return found


def ask(made: NodeClient, ticket: int | None) -> wire.Reply:
    assert ticket is not None
    reply = made.wait(ticket, 10.0)
    assert reply is not None
    return reply


class Raw:
    """A connection that may send anything."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10.0)
        self.sock.connect(str(path))
        self._frames = wire.Frames()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self) -> wire.Reply | None:
        """The next one; None when the node ended the connection."""
        while True:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionError:
                return None
            if not data:
                return None
            for body in self._frames.feed(data):
                return wire.reply(body)

    def ask(self, request: wire.Request) -> wire.Reply | None:
        self.send(wire.frame(request))
        return self.reply()

    def hello(self, session: str, mode: wire.Mode = "map", **changes: object) -> wire.Reply | None:
        fields: dict[str, object] = {
            "id": 1,
            "version": wire.VERSION,
            "role": "scheduler",
            "session": session,
            "worker": "w",
            "rank": 0,
            "layout": layout(BLOCK),
            "mode": mode,
        }
        return self.ask(wire.Hello(**{**fields, **changes}))  # type: ignore[arg-type]

    def close(self) -> None:
        self.sock.close()
