"""The admin listener: what the gateway knows of its workers, its index and itself. Read only."""

from collections.abc import Iterable

from fastapi import Response
from prometheus_client.core import Metric

from cacheindex.hub import Hub
from cacheindex.table import Table
from gateway.app import Parts, json_response, openai_app
from gateway.http import App, Guard
from gateway.metrics import CONTENT_TYPE, counter, gauge
from gateway.workers import Workers


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
        return json_response({"workers": [_describe(worker.name, workers, hub) for worker in workers.all()]})

    @app.get("/v1/index")
    async def index() -> Response:
        return json_response(table.stats())

    return Guard(app, parts.tenants, parts.settings.limits, open_paths=frozenset({"/health"}), admin=True)


def _describe(name: str, workers: Workers, hub: Hub) -> dict[str, object]:
    worker = workers.get(name)
    return {
        "name": name,
        "url": worker.spec.url,
        "up": worker.up,
        "reason": worker.reason,
        "models": sorted(worker.served.names) if worker.served else [],
        "running": worker.running,
        "queued_tokens": worker.queued_tokens,
        "events": hub.status(name),
    }


def observe(workers: Workers, hub: Hub, table: Table) -> Iterable[Metric]:
    """Gauges and counters of state that others keep, read at each scrape."""
    everyone = workers.all()
    by_name = {(worker.name,): worker for worker in everyone}
    yield gauge(
        "hotprefix_worker_up",
        "1 while checks pass.",
        ["worker"],
        {n: float(w.up) for n, w in by_name.items()},
    )
    yield gauge(
        "hotprefix_worker_running",
        "Leases held.",
        ["worker"],
        {n: float(w.running) for n, w in by_name.items()},
    )
    yield gauge(
        "hotprefix_worker_queued_tokens",
        "Prompt tokens leased and not yet computed.",
        ["worker"],
        {n: float(w.queued_tokens) for n, w in by_name.items()},
    )
    snapshot = hub.snapshot()
    sources = snapshot.sources
    trusts = ("exact", "syncing", "suspect", "learned")
    yield gauge(
        "hotprefix_source_trust",
        "1 for the state a worker's events are in.",
        ["worker", "trust"],
        {(name, trust): float(status.trust == trust) for name, status in sources.items() for trust in trusts},
    )
    for field in ("batches", "events", "gaps", "replays", "epochs", "bad_frames"):
        yield counter(
            f"hotprefix_source_{field}",
            f"Event stream: {field.replace('_', ' ')} so far.",
            ["worker"],
            {(name,): float(getattr(status, field)) for name, status in sources.items()},
        )
    yield counter(
        "hotprefix_source_skipped",
        "Events and blocks passed over, by cause.",
        ["worker", "cause"],
        {(name, cause): float(n) for name, status in sources.items() for cause, n in status.skipped.items()},
    )
    stats = table.stats()
    yield gauge("hotprefix_index_entries", "Keys in the index.", [], {(): float(stats.entries)})
    yield gauge("hotprefix_index_bytes", "Bytes the index uses.", [], {(): float(stats.bytes_used)})
    yield counter(
        "hotprefix_index_lost", "Keys dropped because the index was full.", [], {(): float(stats.lost)}
    )
    yield counter(
        "hotprefix_hub_errors", "Turns of the hub that ended early.", [], {(): float(snapshot.errors)}
    )
