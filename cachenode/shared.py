"""Memory files: shared memory without a name, handed from process to process as a descriptor.

Nobody can open what has no name, nothing is left behind by a crash, and the pages go with the last process
that maps them.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable

PAGE = mmap.PAGESIZE
_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x0010)
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_TOUCH_SLICE = 64 * 1024 * 1024


def memory_file(name: str, size: int) -> int:
    """A descriptor of ``size`` zero bytes, whose pages are taken when first written; its size is fixed.
    ``name`` is for people who look into /proc. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_fd(fd: int, size: int, *, write: bool, huge: bool = False) -> mmap.mmap:
    """Maps the file; with ``huge`` the kernel is asked for huge pages, where it has them for shared
    memory. Raises OSError, also where the file is shorter than ``size``."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the memory file could be cut short under its readers")
    if os.fstat(fd).st_size < size:
        raise OSError(f"the memory file has {os.fstat(fd).st_size} bytes, {size} were promised")
    access = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=access)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def seal(fd: int, *, writers: bool) -> None:
    """Nobody who gets the file can change what may be done with it. Without ``writers`` no new mapping can
    write; those there are still can. Raises OSError on kernels before 5.1."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | (0 if writers else _FUTURE_WRITE))


def touch(mapping: mmap.mmap) -> None:
    """Takes every page now, so that no later write has to, and a lack of memory shows at the start
    (OSError). Contents stay as they are."""
    for start in range(0, len(mapping), _TOUCH_SLICE):
        length = min(_TOUCH_SLICE, len(mapping) - start)
        mapping.madvise(_POPULATE_WRITE, start, length)


def close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
