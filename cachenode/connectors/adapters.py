"""What an adapter's files hold: a digest, computed once in the background. Two adapters with the same name
and other files never share KV."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

CHUNK = 4 * 1024 * 1024


def digest_of(folder: Path) -> str:
    """32 hex digits over the names and contents of a folder's files, at any depth; "" where there is no such
    folder, or it holds nothing. Raises OSError."""
    if not folder.is_dir():
        return ""
    state, files = hashlib.sha256(b"hotprefix/adapter/1"), sorted(p for p in folder.rglob("*") if p.is_file())
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as opened:
            while data := opened.read(CHUNK):
                content.update(data)
        name = file.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
        state.update(len(name).to_bytes(4, "little") + name + content.digest())
    return state.hexdigest()[:32] if files else ""


Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(folder: Path) -> Stamp:
    """What changes when a file of the folder does: names, sizes, times."""
    try:
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        return tuple((str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files)
    except OSError:
        return ()


class Adapters:
    """Digests by adapter: its folder and the engine's number for one loading of it. ``start`` runs a function
    in the background. Files that change after they were read leave it open which ones the engine loaded:
    such an adapter has no digest any more, until the engine loads it under another number."""

    def __init__(self, start: Callable[[Callable[[], None]], None] | None = None) -> None:
        self._start = start or _thread
        self._lock = threading.Lock()
        self._stamps: dict[tuple[str, int], Stamp] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self.errors = 0
        """Adapters that could not be read."""

    def digest(self, folder: str, number: int) -> str | None:
        """The digest; None while it is read, or where there is none."""
        stamp, adapter = stamp_of(Path(folder)), (folder, number)
        with self._lock:
            if adapter in self._stamps:
                return self._digests.get(adapter) if self._stamps[adapter] == stamp else None
            self._stamps[adapter] = stamp
        self._start(lambda: self._read(adapter))
        return None

    def _read(self, adapter: tuple[str, int]) -> None:
        try:
            digest = digest_of(Path(adapter[0]))
        except OSError:
            digest = ""
        with self._lock:
            if digest:
                self._digests[adapter] = digest
            else:
                self.errors += 1


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="hotprefix-adapter", daemon=True).start()
