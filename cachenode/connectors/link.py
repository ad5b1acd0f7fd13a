"""The scheduler's connection to the node, kept alive while the engine is idle too.

The engine's thread calls; a thread of our own only polls when nobody did for a while, so that a node that
came or went is noticed without a request. The lock is held for single calls, which never wait for the node.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from cachenode.wire import Reply

IDLE_S = 0.25


class Client(Protocol):
    """What ``cachenode.client.NodeClient`` offers."""

    @property
    def session(self) -> str: ...
    def poll(self) -> list[Reply]: ...
    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int: ...
    def reserve(
        self,
        first: int,
        keys: bytes,
        proofs: bytes,
        adapter: str = "",
        parent: bytes = b"",
        *,
        skip: int = 0,
    ) -> int | None: ...
    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None: ...
    def commit(self, ids: list[int]) -> object: ...
    def abort(self, ids: list[int]) -> object: ...
    def release(self, ids: list[int]) -> object: ...
    def forget(self) -> object: ...
    def quiet(self, session: str) -> None: ...
    def wait(self, ticket: int, seconds: float) -> Reply | None: ...
    def close(self) -> None: ...


class Link:
    """A client for two threads. Replies that the idle thread took are kept for the next ``poll``."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._polled = clock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotprefix-link", daemon=True)

    def start(self) -> None:
        """Begin to poll when nobody does."""
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(IDLE_S):
            self.poll_idle()

    def poll_idle(self) -> None:
        """Poll unless somebody did within the last ``IDLE_S``."""
        with self._lock:
            if self._clock() - self._polled >= IDLE_S:
                self._replies += self._client.poll()

    @property
    def session(self) -> str:
        """The open session; "" without a connection."""
        return self._client.session

    def poll(self) -> list[Reply]:
        with self._lock:
            self._polled = self._clock()
            replies, self._replies = self._replies + self._client.poll(), []
            return replies

    def wait_for(self, tickets: Sequence[int], seconds: float) -> list[Reply]:
        """The replies to these that come within so many seconds, all together."""
        if not tickets:
            return []
        end = self._clock() + seconds
        found: list[Reply] = []
        with self._lock:
            for ticket in tickets:
                if any(reply.id == ticket for reply in self._replies):
                    continue
                reply = self._client.wait(ticket, max(0.0, end - self._clock()))
                if reply is not None:
                    found.append(reply)
        return found

    def match(self, adapter: str, keys: bytes, proofs: bytes) -> int:
        with self._lock:
            return self._client.match(adapter, keys, proofs)

    def reserve(
        self,
        first: int,
        keys: bytes,
        proofs: bytes,
        adapter: str = "",
        parent: bytes = b"",
        *,
        skip: int = 0,
    ) -> int | None:
        with self._lock:
            return self._client.reserve(first, keys, proofs, adapter, parent, skip=skip)

    def lease(
        self, first: int, keys: bytes, proofs: bytes, adapter: str = "", *, skip: int = 0
    ) -> int | None:
        with self._lock:
            return self._client.lease(first, keys, proofs, adapter, skip=skip)

    def commit(self, ids: list[int]) -> None:
        with self._lock:
            self._client.commit(ids)

    def abort(self, ids: list[int]) -> None:
        with self._lock:
            self._client.abort(ids)

    def release(self, ids: list[int]) -> None:
        with self._lock:
            self._client.release(ids)

    def forget(self) -> None:
        with self._lock:
            self._client.forget()

    def quiet(self, session: str) -> None:
        with self._lock:
            self._client.quiet(session)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._client.close()
