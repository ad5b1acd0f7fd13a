"""A worker's side of a session: the node's memory as this process maps it, or in copy mode the socket."""

import logging
import select
import socket
import threading
from typing import Self

import numpy as np
import numpy.typing as npt

from cachenode import shared, unix_path, wire
from cachenode.directory_view import HEADER_BYTES, DirectoryView
from cachenode.record import Layout

JOIN_S = 5.0
COPY_S = 10.0
"""Longest wait for a reply in copy mode; without one the attachment is over."""

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("vllm.hotprefix")


class Attachment:
    """Made by ``join``. ``arena`` is all of the node's memory, to be written inside one's own grants only; it
    is None in copy mode, where ``read`` and ``write`` go through the socket. For several threads."""

    def __init__(
        self, sock: socket.socket, welcome: wire.Welcome, arena: Bytes | None, view: DirectoryView
    ) -> None:
        self._socket: socket.socket | None = sock
        self._frames = wire.Frames()
        self._lock = threading.Lock()
        self._view = view
        self._number = 1
        self.arena = arena
        self.boot = welcome.boot

    @classmethod
    def join(
        cls, path: str, layout: Layout, worker: str, session: str, *, rank: int = 0, mode: wire.Mode = "map"
    ) -> Self | None:
        """Joins the session that the scheduler has opened; None where it is not there any more. Waits for the
        node for a few seconds at most."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors: list[int] = []
        try:
            sock.settimeout(JOIN_S)
            sock.connect(path)
            if not unix_path.is_ours(sock):
                raise PermissionError("the node is another user's")
            hello = wire.Hello(
                id=1,
                version=wire.VERSION,
                role="worker",
                session=session,
                worker=worker,
                rank=rank,
                layout=layout,
                mode=mode,
            )
            sock.sendall(wire.frame(hello))
            welcome, descriptors = _welcome(sock)
            if len(descriptors) != (2 if mode == "map" else 1):
                raise ValueError("a welcome without the node's memory")
            if welcome.directory_bytes < HEADER_BYTES or welcome.bytes < 1:
                raise ValueError("memory of no size")
            arena: Bytes | None = None
            if mode == "map":
                mapped = shared.map_fd(descriptors[0], welcome.bytes, write=True)
                arena = np.frombuffer(mapped, np.uint8)
            directory = shared.map_fd(descriptors[-1], welcome.directory_bytes, write=False)
            return cls(sock, welcome, arena, DirectoryView(memoryview(directory)))
        except (OSError, ValueError) as error:
            log.warning("rank %d cannot join the node at %s: %s", rank, path, error)
            sock.close()
            return None
        finally:
            shared.close(descriptors)

    def valid(self, slot: int, generation: int) -> bool:
        """Whether what was read from this record since the generation was given is its bytes."""
        return self._view.check(slot, generation)

    def alive(self) -> bool:
        """Whether the connection stands, as far as the kernel knows; asks nobody."""
        if not self._lock.acquire(blocking=False):
            return True  # A copy goes through it, and finds out.
        try:
            if self._socket is None:
                return False
            ready = select.poll()
            ready.register(self._socket, select.POLLIN)
            if not ready.poll(0):  # A socket with a timeout would wait in recv, whatever its flags.
                return True
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False
        finally:
            self._lock.release()

    def read(self, lease: int, piece: int, rank: int, offset: int, length: int) -> bytes | None:
        """Copy mode: bytes of a leased piece (see ``wire.Read``); None where they cannot be had."""
        self._number += 1
        reply = self._ask(wire.Read(self._number, lease, piece, rank, offset, length))
        return reply.data if isinstance(reply, wire.Data) and len(reply.data) == length else None

    def write(self, reservation: int, rank: int, offset: int, data: bytes) -> bool:
        """Copy mode: bytes into a reservation (see ``wire.Write``); whether they are there now."""
        self._number += 1
        reply = self._ask(wire.Write(self._number, reservation, rank, offset, bytes(data)))
        return isinstance(reply, wire.Done)

    def close(self) -> None:
        """Ends the session for all of its connections. The memory stays mapped while somebody uses it."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: wire.Read | wire.Write) -> wire.Reply | None:
        with self._lock:
            if self._socket is None:
                return None
            try:
                self._socket.settimeout(COPY_S)
                self._socket.sendall(wire.frame(request))
                while data := self._socket.recv(2 * wire.MAX_COPY):
                    for body in self._frames.feed(data):
                        reply = wire.reply(body)
                        if reply.id == request.id:
                            return reply
            except (OSError, ValueError):
                pass
            self._end()
            return None


def _welcome(sock: socket.socket) -> tuple[wire.Welcome, list[int]]:
    """Raises OSError or ValueError for anything else."""
    frames, descriptors = wire.Frames(), list[int]()
    try:
        while True:
            data, more, _, _ = socket.recv_fds(sock, 65_536, 4)
            descriptors += more
            if not data:
                raise ConnectionError("the node ended the connection")
            for body in frames.feed(data):
                reply = wire.reply(body)
                if isinstance(reply, wire.Welcome):
                    return reply, descriptors
                said = reply.message if isinstance(reply, wire.Failed) else "it did not say why"
                raise ValueError(f"the node does not take this worker: {said}")
    except (OSError, ValueError):
        shared.close(descriptors)
        raise
