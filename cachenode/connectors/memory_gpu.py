"""KV blocks in a GPU's memory: gathered on the device, moved through pinned buffers on a stream of its own.

A block's bytes are put together on the device by one indexing operation over all layers, so that each step
is one large copy over the bus; the arena is reached by memcpy from the pinned buffer while the next step
moves. The arena itself is not registered with the driver: that would pin every page of it, used or not.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

SLOTS = 3
SLOT_BYTES = 16 * 1024 * 1024


class Event(Protocol):
    """The end of what a stream was given so far."""

    def synchronize(self) -> None: ...


class Device(Protocol):
    """One GPU, with a stream of our own. A slot is a pinned buffer of ``slot_bytes``."""

    @property
    def block_bytes(self) -> int: ...
    def pinned(self, size: int) -> Bytes: ...
    def fence(self) -> None:
        """In the engine's thread: our stream waits for what the engine's was given."""

    def gather(self, ids: Sequence[int], slot: Bytes) -> Event:
        """Begin to copy the blocks into the slot."""

    def scatter(self, ids: Sequence[int], slot: Bytes) -> Event:
        """Begin to copy the slot into the blocks."""


class GpuMemory:
    """Copies in steps of a slot, ``slots`` of them under way at once. One thread but for ``fence``."""

    def __init__(self, device: Device, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self._device = device
        self.block_bytes = device.block_bytes
        self._step = max(1, slot_bytes // self.block_bytes)
        self._free = [device.pinned(self._step * self.block_bytes) for _ in range(slots)]
        self._under_way: deque[tuple[Event, Bytes, Callable[[], None]]] = deque()

    def fence(self) -> None:
        self._device.fence()

    def save(self, ids: Sequence[int], into: Bytes) -> None:
        for at in range(0, len(ids), self._step):
            some = ids[at : at + self._step]
            part = into[at * self.block_bytes : (at + len(some)) * self.block_bytes]
            slot = self._slot()
            used = slot[: part.nbytes]
            self._under_way.append((self._device.gather(some, used), slot, _copier(used, part)))

    def load(self, ids: Sequence[int], data: Bytes) -> None:
        for at in range(0, len(ids), self._step):
            some = ids[at : at + self._step]
            part = data[at * self.block_bytes : (at + len(some)) * self.block_bytes]
            slot = self._slot()
            used = slot[: part.nbytes]
            used[...] = part
            self._under_way.append((self._device.scatter(some, used), slot, lambda: None))

    def finish(self) -> None:
        while self._under_way:
            self._drain()

    def _slot(self) -> Bytes:
        if not self._free:
            self._drain()
        return self._free.pop()

    def _drain(self) -> None:
        """The oldest step ends: what it gathered goes where it was to go, and its slot is free."""
        event, slot, then = self._under_way.popleft()
        event.synchronize()
        then()
        self._free.append(slot)


def _copier(source: Bytes, target: Bytes) -> Callable[[], None]:
    def copy() -> None:
        target[...] = source

    return copy


class TorchDevice:
    """A CUDA device through torch. ``regions``: views (parts, blocks, bytes) of the KV on the device."""

    def __init__(self, regions: Sequence[torch.Tensor]) -> None:
        self._regions = list(regions)
        self._device = regions[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._fence: torch.cuda.Event | None = None
        self._kept: list[torch.Tensor] = []
        self.block_bytes = sum(region.shape[0] * region.shape[2] for region in regions)

    def pinned(self, size: int) -> Bytes:
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._kept.append(buffer)
        array: Bytes = buffer.numpy()
        return array

    def fence(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._fence = event

    def gather(self, ids: Sequence[int], slot: Bytes) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            self._wait()
            index = torch.tensor(ids, dtype=torch.int64, device=self._device)
            columns = [region.index_select(1, index).transpose(0, 1).flatten(1) for region in self._regions]
            together = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
            torch.from_numpy(slot).view(len(ids), self.block_bytes).copy_(together, non_blocking=True)
            return self._event()

    def scatter(self, ids: Sequence[int], slot: Bytes) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            self._wait()
            index = torch.tensor(ids, dtype=torch.int64, device=self._device)
            table = (
                torch.from_numpy(slot).to(self._device, non_blocking=True).view(len(ids), self.block_bytes)
            )
            column = 0
            for region in self._regions:
                parts, _, size = region.shape
                mine = table[:, column : column + parts * size].reshape(len(ids), parts, size)
                region.index_copy_(1, index, mine.transpose(0, 1))
                column += parts * size
            return self._event()

    def _wait(self) -> None:
        if self._fence is not None:
            self._stream.wait_event(self._fence)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
