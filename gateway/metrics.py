"""What the gateway counts. Children are bound once; the hot path only adds."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.prediction import CAUSES, Cause
from gateway.stream import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OUTCOMES = ("ok", "client_error", "refused", "failed", "broken_stream", "client_gone", "stopped", "crashed")

Labelled = Mapping[tuple[str, ...], float]
"""Values by the tuple of their labels' values."""


class Metrics:
    """Conservation: submitted = sum of ended over outcomes + in flight."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.registry = CollectorRegistry()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._submitted = count("hotprefix_requests", "Requests that arrived.")
        ended = count("hotprefix_requests_ended", "Requests that ended, by outcome.", "outcome")
        self._ended = {outcome: ended.labels(outcome) for outcome in OUTCOMES}
        self._in_flight = Gauge(
            "hotprefix_requests_in_flight", "Requests being served.", registry=self.registry
        )
        self._routed = count("hotprefix_routed", "Choices, by worker and policy.", "worker", "policy")
        self._failed = count("hotprefix_attempts_failed", "Failed attempts.", "worker", "reason")
        self._retried = count("hotprefix_retries", "Requests tried at another worker.", "reason")
        self._inexact = count("hotprefix_prompts_inexact", "Prompts not routed by their tokens.", "reason")
        ttft = Histogram(
            "hotprefix_ttft_seconds",
            "From a request's head to the engine's first byte (of a whole answer: its end).",
            ["worker"],
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        prompt = count("hotprefix_prompt_tokens", "Prompt tokens the engines counted.", "worker")
        cached = count("hotprefix_cached_tokens", "Of them, those the engines had cached.", "worker")
        predicted = count("hotprefix_predicted_tokens", "Cached tokens we predicted.", "worker")
        judged = count(
            "hotprefix_predictions", "Predicted against reported cached tokens.", "worker", "cause"
        )
        names = list(workers)
        self._ttft = {name: ttft.labels(name) for name in names}
        self._tokens = {
            name: (prompt.labels(name), cached.labels(name), predicted.labels(name)) for name in names
        }
        self._judged = {(name, cause): judged.labels(name, cause) for name in names for cause in CAUSES}

    def submitted(self) -> None:
        self._submitted.inc()
        self._in_flight.inc()

    def ended(self, outcome: str) -> None:
        self._in_flight.dec()
        self._ended[outcome].inc()

    def routed(self, worker: str, policy: str) -> None:
        self._routed.labels(worker, policy).inc()

    def attempt_failed(self, worker: str, reason: str) -> None:
        self._failed.labels(worker, reason).inc()

    def retried(self, reason: str) -> None:
        self._retried.labels(reason).inc()

    def inexact(self, reason: str) -> None:
        self._inexact.labels(reason).inc()

    def first_byte(self, worker: str, seconds: float) -> None:
        self._ttft[worker].observe(seconds)

    def finished(self, worker: str, usage: Usage | None, predicted: int, cause: Cause | None) -> None:
        prompt, cached, expected = self._tokens[worker]
        expected.inc(predicted)
        if usage is not None:
            prompt.inc(usage.prompt_tokens)
            cached.inc(usage.cached_tokens or 0)
        if cause is not None:
            self._judged[worker, cause].inc()

    def observe(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add gauges that are read only when somebody asks."""
        self.registry.register(_Read(collect))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Read(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def gauge(name: str, text: str, labels: list[str], values: Labelled) -> Metric:
    """A gauge family from ready values, one for each tuple of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for labelled, value in values.items():
        family.add_metric(labelled, value)
    return family


def counter(name: str, text: str, labels: list[str], values: Labelled) -> Metric:
    """A counter family from ready values, one for each tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for labelled, value in values.items():
        family.add_metric(labelled, value)
    return family
