"""What the node counts, as Prometheus reads it: taken from the store when asked, never counted twice."""

from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachenode.store import Figures

KINDS = ("free", "used", "leased", "reserved", "quarantined")
"""Of the arena's bytes; together they are its size."""

STORE_COUNTERS = {
    "stored_records": "Records committed.",
    "stored_blocks": "Engine blocks committed.",
    "stored_bytes": "Bytes committed.",
    "refused_blocks": "Engine blocks that were not stored because memory was full of what may not go.",
    "aborted_records": "Reservations that were given up.",
    "asked_blocks": "Engine blocks that leases asked for.",
    "leased_blocks": "Engine blocks that leases got.",
    "leased_bytes": "Bytes that leases got.",
    "evicted_records": "Records evicted.",
    "conflicts": "Keys met with another proof.",
    "directory_full": "Records given up because the directory was full of what may not go.",
}
SOCKET_COUNTERS = {
    "requests": "Requests on the control socket.",
    "refused": "Requests that were refused.",
    "sessions": "Sessions opened.",
    "sessions_lost": "Sessions that ended.",
}
EVENT_COUNTERS = {
    "batches": "Batches of events published.",
    "questions": "Replays and snapshots asked for.",
    "bad_questions": "Messages that were no question.",
    "questions_dropped": "Questions not answered because too many were.",
    "answers_cut": "Answers that their asker did not take.",
}


class Status(msgspec.Struct, frozen=True):
    """The node at one moment. ``sessions`` are open, ``quarantined`` ones may still be copying."""

    node: str
    boot: str
    socket: str
    figures: Figures
    sessions: int
    quarantined: int
    serves: list[tuple[str, str]]
    connections: int
    turns: int
    errors: int
    requests: Mapping[str, int]
    events: Mapping[str, int]
    uptime_s: float


class _Families(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status, figures = self._status, self._status.figures
        memory = GaugeMetricFamily(
            "hotprefix_node_memory_bytes", "Bytes of the arena by what they are.", labels=["kind"]
        )
        for kind in KINDS:
            memory.add_metric([kind], getattr(figures, kind))
        yield memory
        for name, value, text in (
            ("memory_size_bytes", figures.total, "Size of the arena."),
            ("records", figures.records, "Records that can be found."),
            ("blocks", figures.blocks, "Engine blocks that can be found."),
            ("pinned_records", figures.pinned, "Records that are pinned."),
            ("reservations", figures.reservations, "Reservations open."),
            ("leases", figures.leases, "Leases open."),
            ("sessions_open", status.sessions, "Engines connected."),
            ("sessions_quarantined", status.quarantined, "Sessions that ended and may still be copying."),
            ("connections", status.connections, "Connections to the control socket."),
            ("uptime_seconds", status.uptime_s, "Since the start."),
        ):
            yield GaugeMetricFamily(f"hotprefix_node_{name}", text, value=value)
        for names, counts in (
            (STORE_COUNTERS, figures.counters),
            (SOCKET_COUNTERS, status.requests),
            (EVENT_COUNTERS, status.events),
        ):
            for name, text in names.items():
                yield CounterMetricFamily(f"hotprefix_node_{name}", text, value=counts.get(name, 0))
        yield CounterMetricFamily("hotprefix_node_errors", "Faults of the node's own.", value=status.errors)


def exposition(status: Status) -> bytes:
    """The text that ``GET /metrics`` answers with."""
    registry = CollectorRegistry()
    registry.register(_Families(status))
    return generate_latest(registry)
