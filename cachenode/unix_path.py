"""The node's control socket in the file system: who may have the path, and who may connect."""

import os
import socket
import stat
import struct
from pathlib import Path

MAX_PATH_BYTES = 107
BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")


def listen(path: Path) -> socket.socket:
    """A listening unix socket that only this user can open. Takes over what a dead node left there.

    Raises OSError or ValueError, with words for the operator, where a live process answers on the path, where
    it is something else than a socket, or where it is too long.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(
            f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes: choose a shorter one"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    others = folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX
    if folder.st_uid not in (0, os.geteuid()) or others:
        raise ValueError(f"others can replace files in {path.parent}: choose a folder of this user's alone")
    if path.is_symlink() or path.exists():
        if path.is_symlink() or not stat.S_ISSOCK(path.lstat().st_mode):
            raise ValueError(f"{path} is there and is no socket: remove it or choose another path")
        if _answers(path):
            raise ValueError(f"a node is running on {path} already: stop it or choose another path")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # Busy or not ours: leave it alone.
        return True


def identity(path: Path) -> tuple[int, int]:
    """Tells this socket file from a later one of the same name. Raises OSError where there is none."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def remove(path: Path, mine: tuple[int, int]) -> None:
    """Unlinks the path while it is still this one."""
    try:
        if identity(path) == mine:
            path.unlink()
    except FileNotFoundError:
        pass


def is_ours(connection: socket.socket) -> bool:
    """Whether root's or this user's process is at the other end."""
    return peer(connection)[1] in (0, os.geteuid())


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
