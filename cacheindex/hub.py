"""Feeds the table from engines' event streams: one thread, no call of which blocks the caller."""

import time
from collections.abc import Callable

import msgspec

from cacheindex.trust import Trust
from cacheindex.table import Table


class SourceSpec(msgspec.Struct, frozen=True):
    """Where a worker's events come from.

    ``model`` is the base model, the namespace of its keys. ``endpoint`` is the ZMQ address of its
    publisher: connected to, or with ``bind`` bound, for engines that connect to us. Each worker
    needs an endpoint of its own. ``topic_prefix`` subscribes to topics that begin so; "" to all.
    """

    worker: str
    model: str
    endpoint: str
    replay_endpoint: str | None = None
    bind: bool = False
    topic_prefix: str = ""


class SourceStatus(msgspec.Struct, frozen=True):
    """What is known of a source at the end of the hub's last turn. ``block_size`` is the engine's
    own, None before its first event; ``stride`` what its keys are rounded to. ``skipped`` counts
    events and blocks passed over, by cause. Counters only grow while the source is watched."""

    trust: Trust
    reason: str = ""
    connected: bool = False
    block_size: int | None = None
    stride: int | None = None
    last_seq: int | None = None
    batches: int = 0
    events: int = 0
    gaps: int = 0
    replays: int = 0
    epochs: int = 0
    bad_frames: int = 0
    blocks: int = 0
    skipped: dict[str, int] = {}
    lag_s: float | None = None


class HubSnapshot(msgspec.Struct, frozen=True):
    """``errors`` counts faults of our own that ended a turn early; it should be 0."""

    sources: dict[str, SourceStatus]
    turns: int
    errors: int
    reports_dropped: int


class Hub:
    """``start`` and ``close`` begin and end its one thread. Every other call returns at once, may
    come from any thread, and is taken at the thread's next turn."""

    def __init__(
        self,
        table: Table,
        *,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        max_queue: int = 10_000,
        allow_remote_bind: bool = False,
    ) -> None:
        self.table = table

    def start(self) -> None: ...

    def close(self) -> None:
        """Ends the thread and closes every socket; waits for at most two seconds."""

    def watch(self, spec: SourceSpec) -> None:
        """Follow this source; a worker watched already is replaced when its spec differs.

        Raises ValueError for an endpoint that is no ipc or tcp address, and for a tcp address
        beyond loopback that would be bound without ``allow_remote_bind``."""

    def unwatch(self, worker: str) -> None:
        """Forget the worker and what it holds."""

    def new_epoch(self, worker: str, reason: str) -> None:
        """The worker's process may be another one: all it said before is forgotten."""

    def report(self, worker: str, agreed: bool) -> None:
        """How a prediction that nothing else explains compared with the engine's answer."""

    def status(self, worker: str) -> SourceStatus | None:
        """None for a worker that is not watched."""
        return None

    def snapshot(self) -> HubSnapshot:
        """The status of all sources, for metrics."""
        return HubSnapshot(sources={}, turns=0, errors=0, reports_dropped=0)
