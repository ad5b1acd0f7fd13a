"""A node in a thread of the test's process: the real store behind the real socket, without configuration,
events or admin page."""

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from cachenode.arena import Space
from cachenode.directory import Directory
from cachenode.directory_view import Sizes
from cachenode.server import Memory, Server
from cachenode.shared import map_fd, memory_file, seal
from cachenode.store import Figures, Store
from policies.eviction import DEFAULT, build


class Deaf:
    """Nobody listens to events here."""

    def stored(self, fingerprint: str, block_tokens: int, keys: bytes) -> None: ...

    def removed(self, fingerprint: str, block_tokens: int, keys: bytes) -> None: ...


class LivingNode:
    """Serves at ``path`` from the start to the end of ``with``."""

    def __init__(self, path: Path, size: int, *, blocks: int = 20_000, eviction: str = DEFAULT) -> None:
        sizes = Sizes.of(blocks, blocks)
        self._files = [memory_file("test-arena", size), memory_file("test-directory", sizes.bytes)]
        arena, table = (
            map_fd(fd, length, write=True)
            for fd, length in zip(self._files, (size, sizes.bytes), strict=True)
        )
        seal(self._files[1], writers=False)
        policy = build({"name": eviction}, size)
        self.path = str(path)
        self.store = Store(Space(size), Directory(memoryview(table), sizes), policy, Deaf())
        memory = Memory(self._files[0], memoryview(arena), self._files[1], sizes.bytes)
        self._server = Server(path, self.store, memory, node="living", boot=os.urandom(8).hex())
        self._thread = threading.Thread(target=self._server.run, name="living-node", daemon=True)

    def figures(self) -> Figures:
        """As of now."""
        return self._server.call(self.store.figures)

    def clear(self) -> None:
        """Everything that is held goes."""
        self._server.call(self.store.clear)

    def sound(self) -> bool:
        """Whether nothing contradicts itself, and no request met a fault of ours."""
        self._server.call(self.store.check_integrity)
        return self._server.errors == 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        self._thread.join(10.0)
        self._server.close()
        for fd in self._files:
            os.close(fd)
