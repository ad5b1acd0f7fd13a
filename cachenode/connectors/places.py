"""A worker's attachments, one a session: joined in the background, closed when no copy needs them."""

import logging
import threading
from collections.abc import Callable, Set
from typing import Protocol

from cachenode.connectors.transfer import Place

log = logging.getLogger("vllm.hotprefix")


class Attached(Place, Protocol):
    """A place that can be left."""

    def close(self) -> None: ...


Attach = Callable[[str], Attached | None]
"""Joins a session; None where it is gone. May take a while."""


class Places:
    """``follow`` is called by the engine's thread, ``get`` by copy threads."""

    def __init__(self, attach: Attach) -> None:
        self._attach = attach
        self._lock = threading.Lock()
        self._joined: dict[str, Attached] = {}
        self._current = ""

    def follow(self, session: str, needed: Callable[[], Set[str]]) -> None:
        """``session`` is the open one; others go once they are not ``needed`` by copies any more."""
        if session != self._current:
            self._current = session
            if session:
                threading.Thread(target=self.get, args=(session,), name="hotprefix-join", daemon=True).start()
        if len(self._joined) > (session in self._joined):
            self._leave(needed() | {session})

    def _leave(self, kept: Set[str]) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            gone = [self._joined.pop(one) for one in list(self._joined) if one not in kept]
        finally:
            self._lock.release()
        for place in gone:
            place.close()

    def get(self, session: str) -> Attached | None:
        """The attachment, joined now where it was not; None where that fails, to be tried again."""
        with self._lock:
            place = self._joined.get(session)
            if place is None and session:
                place = self._attach(session)
                if place is not None:
                    self._joined[session] = place
            return place

    def close(self) -> None:
        with self._lock:
            gone, self._joined = list(self._joined.values()), {}
        for place in gone:
            place.close()
