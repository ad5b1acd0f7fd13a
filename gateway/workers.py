"""The gateway's view of its engines: what each serves, whether it is up, and what it owes.

Pure state: health checks and requests tell it what they saw. Every attempt at a worker holds a
lease, released exactly once; ``check_integrity`` holds a worker's load equal to the sum of its leases.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway import config


class Served(msgspec.Struct, frozen=True):
    """What a worker said of itself at its last good check.

    ``names`` maps each model id to its adapter ("" for the base model and its aliases); ``base`` is
    the first id. ``entries`` are the raw items of ``/v1/models``. ``started`` is the engine's own
    start time (Unix seconds), 0 if it does not tell.
    """

    base: str
    names: Mapping[str, str]
    entries: Sequence[Mapping[str, Any]]
    root: str | None = None
    max_model_len: int | None = None
    started: float = 0.0


class Lease:
    """One attempt at one worker, which has ``queued_tokens`` of prompt to compute for it.
    ``interrupt`` is called if the worker goes down meanwhile, before the first byte, or is found to
    have been restarted."""

    __slots__ = ("_open", "computed", "interrupt", "queued_tokens", "worker")

    def __init__(self, worker: "Worker", queued_tokens: int, interrupt: Callable[[], None]) -> None:
        self.worker, self.interrupt = worker, interrupt
        self.queued_tokens, self._open = queued_tokens, True
        self.computed = False
        worker.leases.add(self)
        worker.queued_tokens += queued_tokens

    def first_byte(self) -> None:
        """The prompt has been computed: it no longer queues."""
        self.computed = True
        self.worker.queued_tokens -= self.queued_tokens
        self.queued_tokens = 0

    def release(self) -> None:
        """Safe to call again; only the first call counts."""
        if self._open:
            self._open = False
            self.first_byte()
            self.worker.leases.remove(self)


class Worker:
    """One engine (or one data-parallel rank of it)."""

    def __init__(self, spec: config.Worker) -> None:
        self.spec = spec
        self.name = spec.name
        self.served: Served | None = None
        self.up = False
        self.reason = "not checked yet"
        self.failures = 0
        self.leases: set[Lease] = set()
        self.queued_tokens = 0

    @property
    def running(self) -> int:
        return len(self.leases)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counted load is not the sum of the open leases."""
        total = sum(lease.queued_tokens for lease in self.leases)
        assert self.queued_tokens == total, f"{self.name}: {self.queued_tokens} counted, {total} leased"


class Workers:
    """All workers, by name. ``on_down`` and ``on_up`` hear of every change of state, ``on_up`` also
    of an engine that was restarted between two checks."""

    def __init__(
        self,
        specs: Iterable[config.Worker],
        health: config.Health,
        on_up: Callable[[Worker], None],
        on_down: Callable[[Worker, str], None],
    ) -> None:
        self._by_name = {spec.name: Worker(spec) for spec in specs}
        self._health = health
        self._on_up, self._on_down = on_up, on_down

    def all(self) -> list[Worker]:
        return list(self._by_name.values())

    def get(self, name: str) -> Worker:
        return self._by_name[name]

    def serving(self, model: str | None) -> list[Worker]:
        """The workers that are up and serve this model id; any model where none is named."""
        return [
            worker
            for worker in self._by_name.values()
            if worker.up and worker.served and (model is None or model in worker.served.names)
        ]

    def known(self, model: str) -> bool:
        """Whether a worker serves this model, or did when it was last up."""
        return any(w.served is not None and model in w.served.names for w in self._by_name.values())

    def models(self) -> list[Mapping[str, Any]]:
        """The merged ``/v1/models`` of all workers that are up, each id once, in their words but for
        ``root``, a path on the engine's machine."""
        entries: dict[str, Mapping[str, Any]] = {}
        for worker in self.serving(None):
            for entry in worker.served.entries if worker.served else ():
                shown = {name: value for name, value in entry.items() if name != "root"}
                entries.setdefault(str(entry.get("id")), shown)
        return list(entries.values())

    def lease(self, name: str, queued_tokens: int, interrupt: Callable[[], None]) -> Lease:
        return Lease(self._by_name[name], queued_tokens, interrupt)

    def passed(self, worker: Worker, served: Served) -> None:
        """A check went well. Another start time than before means another life of the engine; one that
        it did not tell this time means nothing."""
        before = worker.served
        started = before.started if before is not None else 0.0
        if not served.started:
            served = msgspec.structs.replace(served, started=started)
        restarted = worker.up and started not in (0.0, served.started)
        fresh = not worker.up or before is None
        worker.served, worker.failures = served, 0
        if restarted:
            self._take_down(worker, "restarted", gone=True)
        worker.up, worker.reason = True, ""
        if restarted or fresh:
            self._on_up(worker)

    def failed(self, worker: Worker, reason: str, *, refused: bool) -> None:
        """A check or an attempt failed. A refused connection is final, others are counted."""
        worker.failures += 1
        if not worker.up:
            worker.reason = reason
        elif refused or worker.failures >= self._health.failures:
            self._take_down(worker, reason, gone=False)

    def _take_down(self, worker: Worker, reason: str, *, gone: bool) -> None:
        """Requests that still wait for a first byte are planned again. Streams that flow are left
        alone, since a slow check is not their end, unless the engine's process is ``gone``."""
        worker.up, worker.reason = False, reason
        self._on_down(worker, reason)
        for lease in list(worker.leases):
            if gone or not lease.computed:
                lease.interrupt()


def parse_models(payload: object, started: float) -> Served:
    """Read an engine's ``/v1/models``. Raises ValueError when it is not in OpenAI's form."""
    data = payload.get("data") if isinstance(payload, dict) else None
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    ids = [entry["id"] for entry in entries if isinstance(entry.get("id"), str)]
    if not ids:
        raise ValueError("its /v1/models lists no model")
    known = set(ids)
    names = {
        entry["id"]: entry["id"] if entry.get("parent") in known else ""
        for entry in entries
        if isinstance(entry.get("id"), str)
    }
    first = entries[0]
    root, limit = first.get("root"), first.get("max_model_len")
    return Served(
        base=ids[0],
        names=names,
        entries=entries,
        root=root if isinstance(root, str) else None,
        max_model_len=limit if isinstance(limit, int) else None,
        started=started,
    )
