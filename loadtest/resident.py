"""What a process costs beyond the memory it was told to hold: resident bytes without the arena, CPU seconds.

Linux only, from ``/proc``.
"""

import re
from pathlib import Path

import msgspec
import psutil

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_KIB = 1024


class Mapping(msgspec.Struct, frozen=True):
    """One line of a process's memory map. Bytes; ``resident`` counts shared pages whole."""

    name: str
    size: int
    resident: int


def mappings(smaps: str) -> list[Mapping]:
    """Reads ``/proc/PID/smaps``."""
    found: list[Mapping] = []
    name, size, resident = "", 0, 0
    for line in smaps.splitlines():
        if head := _MAPPING.match(line):
            if size:
                found.append(Mapping(name, size, resident))
            name, size, resident = head[1], 0, 0
        elif line.startswith("Size:"):
            size = int(line.split()[1]) * _KIB
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) * _KIB
    if size:
        found.append(Mapping(name, size, resident))
    return found


def beyond(found: list[Mapping], arena_bytes: int) -> int:
    """Resident bytes of all mappings but the arena: a memory file of at least ``arena_bytes``. Code that
    other processes share counts whole, so this is rather too much than too little."""
    return sum(
        one.resident for one in found if not (one.name.startswith("/memfd:") and one.size >= arena_bytes)
    )


def resident_beyond(pid: int, arena_bytes: int) -> int:
    """``beyond`` of a process and its children."""
    total = 0
    for one in _tree(pid):
        total += beyond(mappings(Path(f"/proc/{one}/smaps").read_text()), arena_bytes)
    return total


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far. In nanoseconds from the scheduler, since
    clock ticks of 10 ms are too coarse for an idle process; threads that ended are not in it."""
    total = 0
    for one in _tree(pid):
        for task in Path(f"/proc/{one}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _tree(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]
