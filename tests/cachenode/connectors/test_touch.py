"""Taking the pages of an engine's KV: all of them, and no byte changes."""

import mmap

import numpy as np

from cachenode.connectors.memory_cpu import touch


def resident(address: int) -> bool:
    """Whether this page is there, as /proc/self/pagemap has it."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * (address // mmap.PAGESIZE))
        return bool(int.from_bytes(pages.read(8), "little") >> 63)


def test_every_page_is_there_afterwards_and_its_bytes_are_as_before() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)[100:-100]
    memory[70_000] = 9
    last = memory.ctypes.data + memory.nbytes - 1
    assert not resident(last)
    assert touch(memory)
    assert all(resident(at) for at in range(memory.ctypes.data, last, mmap.PAGESIZE))
    assert memory[70_000] == 9
    assert int(memory.sum()) == 9
