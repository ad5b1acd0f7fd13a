"""The admin listener: what the gateway knows of its workers, its index and itself. Read only."""

from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from fastapi import Response
from prometheus_client.core import Metric

from cacheindex.hub import Hub, HubSnapshot
from cacheindex.table import Table
from cacheindex.trust import Trust
from gateway.app import Parts, json_response, openai_app
from gateway.http import App, Guard
from gateway.metrics import CONTENT_TYPE, Labelled, counter, gauge
from gateway.workers import Worker, Workers

TRUSTS: tuple[str, ...] = get_args(Trust)


def build_admin(parts: Parts, hub: Hub, table: Table) -> App:
    """The admin listener's ASGI application; every path but ``/health`` wants an admin's key."""
    workers, metrics = parts.workers, parts.metrics
    app = openai_app()

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "alive"})

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/workers")
    async def list_workers() -> Response:
        return json_response({"workers": [_describe(worker, parts, hub) for worker in workers.all()]})

    @app.get("/v1/index")
    async def index() -> Response:
        return json_response(table.stats())

    return Guard(app, parts.tenants, parts.settings.limits, open_paths=frozenset({"/health"}), admin=True)


def _describe(worker: Worker, parts: Parts, hub: Hub) -> dict[str, object]:
    served = worker.served
    return {
        "name": worker.name,
        "url": worker.spec.url,
        "up": worker.up,
        "reason": worker.reason,
        "models": sorted(served.names) if served else [],
        "tokenizer": "unknown" if served is None else parts.tokenizers.why_not(served.base) or "loaded",
        "running": worker.running,
        "queued_tokens": worker.queued_tokens,
        "events": hub.status(worker.name),
    }


def observe(workers: Workers, hub: Hub, table: Table) -> Iterable[Metric]:
    """Gauges and counters of state that others keep, read at each scrape."""
    yield from _of_workers(workers.all())
    yield from _of_sources(hub.snapshot())
    stats = table.stats()
    yield gauge("hotprefix_index_entries", "Keys in the index.", [], {(): float(stats.entries)})
    yield gauge("hotprefix_index_bytes", "Bytes the index uses.", [], {(): float(stats.bytes_used)})
    yield counter("hotprefix_index_lost", "Keys dropped: the index was full.", [], {(): float(stats.lost)})


def _of_workers(workers: Sequence[Worker]) -> Iterable[Metric]:
    facts: dict[str, tuple[str, Callable[[Worker], float]]] = {
        "up": ("1 while checks pass.", lambda worker: worker.up),
        "running": ("Leases held.", lambda worker: worker.running),
        "queued_tokens": ("Prompt tokens it has yet to compute.", lambda worker: worker.queued_tokens),
    }
    for name, (text, read) in facts.items():
        values: Labelled = {(worker.name,): float(read(worker)) for worker in workers}
        yield gauge(f"hotprefix_worker_{name}", text, ["worker"], values)


def _of_sources(snapshot: HubSnapshot) -> Iterable[Metric]:
    sources = snapshot.sources
    yield gauge(
        "hotprefix_source_trust",
        "1 for the state a worker's events are in.",
        ["worker", "trust"],
        {(name, trust): float(one.trust == trust) for name, one in sources.items() for trust in TRUSTS},
    )
    for field in ("batches", "events", "gaps", "replays", "epochs", "bad_frames"):
        values: Labelled = {(name,): float(getattr(one, field)) for name, one in sources.items()}
        text = f"Event stream: {field.replace('_', ' ')} so far."
        yield counter(f"hotprefix_source_{field}", text, ["worker"], values)
    yield counter(
        "hotprefix_source_skipped",
        "Events and blocks passed over, by cause.",
        ["worker", "cause"],
        {(name, cause): float(n) for name, one in sources.items() for cause, n in one.skipped.items()},
    )
    yield counter("hotprefix_hub_errors", "Turns cut short by a fault.", [], {(): float(snapshot.errors)})
