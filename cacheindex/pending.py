"""Numbered batches, and a bounded place where those wait that came before their turn."""

from typing import Generic, TypeVar

import msgspec

Body = TypeVar("Body")


class Numbered(msgspec.Struct, Generic[Body], frozen=True):
    """A batch as its source numbered it. ``digest`` tells two batches with one number apart;
    ``size`` is what it costs to keep, in bytes."""

    seq: int
    body: Body
    digest: int
    size: int


class Pending(Generic[Body]):
    """Batches by number, at most so many and so many bytes."""

    def __init__(self, most_batches: int, most_bytes: int) -> None:
        self._most_batches, self._most_bytes = most_batches, most_bytes
        self._batches: dict[int, Numbered[Body]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, batch: Numbered[Body]) -> str:
        """ "" where it was taken, else why not."""
        if batch.seq in self._batches:
            return "duplicate"
        if len(self._batches) >= self._most_batches or self._bytes + batch.size > self._most_bytes:
            return "too many pending"
        self._batches[batch.seq] = batch
        self._bytes += batch.size
        return ""

    def pop(self, seq: int) -> Numbered[Body] | None:
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._bytes -= batch.size
        return batch

    def drop_before(self, seq: int) -> None:
        for early in [number for number in self._batches if number < seq]:
            self.pop(early)

    @property
    def first(self) -> int | None:
        return min(self._batches, default=None)

    @property
    def last_run(self) -> int | None:
        """Where the last run of numbers without a hole begins."""
        if not self._batches:
            return None
        seq = max(self._batches)
        while seq - 1 in self._batches:
            seq -= 1
        return seq
