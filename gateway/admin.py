"""The admin listener: what the gateway knows of its workers, its index and itself. Read only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import msgspec
from fastapi import Response
from prometheus_client.core import Metric

from cacheindex.hub import Hub, HubSnapshot, NodeStatus, SourceStatus
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

    @app.get("/v1/nodes")
    async def list_nodes() -> Response:
        statuses = {node.name: hub.node(node.name) for node in parts.settings.nodes}
        return json_response({"nodes": [_describe_node(name, one) for name, one in statuses.items()]})

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
        "node": _attached(worker, hub),
    }


def _attached(worker: Worker, hub: Hub) -> dict[str, object] | None:
    """The node beside it, and the layouts in which that serves it; None without a node."""
    node = worker.spec.node
    status = hub.node(node) if node is not None else None
    if status is None:
        return None
    layouts = sorted(status.serves.get(worker.name, ()))
    return {"name": node, "trust": status.trust, "layouts": layouts}


def _describe_node(name: str, status: NodeStatus | None) -> dict[str, object]:
    if status is None:
        return {"name": name}
    serves = {worker: sorted(layouts) for worker, layouts in sorted(status.serves.items())}
    return {"name": name, **msgspec.structs.asdict(status), "serves": serves}


def observe(workers: Workers, hub: Hub, table: Table) -> Iterable[Metric]:
    """Gauges and counters of state that others keep, read at each scrape."""
    yield from _of_workers(workers.all())
    snapshot = hub.snapshot()
    yield from _of_sources(snapshot)
    yield from _of_nodes(snapshot.nodes)
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
    yield from _of_streams("source", "worker", snapshot.sources, ())
    yield counter("hotprefix_hub_errors", "Turns cut short by a fault.", [], {(): float(snapshot.errors)})


def _of_nodes(nodes: Mapping[str, NodeStatus]) -> Iterable[Metric]:
    yield from _of_streams("node_source", "node", nodes, ("snapshots",))
    held: Labelled = {(name,): float(one.keys) for name, one in nodes.items()}
    yield gauge("hotprefix_node_source_keys", "Keys the node holds.", ["node"], held)
    for field, unit in (("fill", "used_bytes"), ("rates", "bytes_per_second")):
        values: Labelled = {
            (name, tier): float(value)
            for name, one in nodes.items()
            for tier, value in getattr(one, field).items()
        }
        yield gauge(f"hotprefix_node_source_{unit}", "As the node said last.", ["node", "tier"], values)


def _of_streams(
    kind: str, label: str, streams: Mapping[str, SourceStatus | NodeStatus], more: Sequence[str]
) -> Iterable[Metric]:
    """What the streams of workers and of nodes have in common, and ``more`` counters."""
    yield gauge(
        f"hotprefix_{kind}_trust",
        f"1 for the state a {label}'s events are in.",
        [label, "trust"],
        {(name, trust): float(one.trust == trust) for name, one in streams.items() for trust in TRUSTS},
    )
    for field in ("batches", "events", "gaps", "replays", "epochs", "bad_frames", *more):
        values: Labelled = {(name,): float(getattr(one, field)) for name, one in streams.items()}
        text = f"Event stream: {field.replace('_', ' ')} so far."
        yield counter(f"hotprefix_{kind}_{field}", text, [label], values)
    yield counter(
        f"hotprefix_{kind}_skipped",
        "Events and blocks passed over, by cause.",
        [label, "cause"],
        {(name, cause): float(n) for name, one in streams.items() for cause, n in one.skipped.items()},
    )
