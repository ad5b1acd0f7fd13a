"""An outside signal that becomes an exception inside one task's ``with`` block."""

import asyncio
from types import TracebackType
from typing import Self


class Interrupted(Exception):
    """Raised where the block was waiting; ``reason`` is what ``fire`` was given."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Interrupt:
    """``fire`` may be called at any time from the same loop; only the first call inside the block
    counts, calls outside it do nothing. A cancellation from elsewhere stays a cancellation."""

    __slots__ = ("_task", "reason")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self.reason: str | None = None

    def fire(self, reason: str) -> None:
        if self._task is not None and self.reason is None:
            self.reason = reason
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.reason is None or task is None:
            return
        others = task.uncancel()
        if kind is asyncio.CancelledError and others == 0:
            raise Interrupted(self.reason) from None
