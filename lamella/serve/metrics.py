"""What Prometheus reads, in a registry of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamella.serve.backend import Stats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _OfEngine(Collector):
    """Figures of the engine, read when they are asked for."""

    def __init__(self, stats: Callable[[], Stats], adapters: Callable[[], int]) -> None:
        self._stats = stats
        self._adapters = adapters

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, value, text in (
            ("running", stats.running, "Requests that the engine works on"),
            ("queue", stats.waiting, "Requests that wait for the engine"),
            ("kv_tokens_used", stats.kv_tokens_used, "Tokens reserved in the key/value cache"),
            ("kv_tokens", stats.kv_tokens, "Tokens that the key/value cache holds"),
            ("adapters", self._adapters(), "Adapters served"),
        ):
            yield GaugeMetricFamily(f"lamella_{name}", text, value=value)
        batches = CounterMetricFamily("lamella_decode_steps", "Decode steps by rows written together", labels=["rows"])
        for rows, count in sorted(stats.batches_by_rows.items()):
            batches.add_metric([str(rows)], count)
        yield batches
        yield CounterMetricFamily("lamella_walks", "Passes through the layers", value=stats.walks)
        yield CounterMetricFamily("lamella_walk_seconds", "Seconds of passes through the layers", value=stats.walk_s)


class ServeMetrics:
    """Counts of the HTTP side; keys, texts and names that callers make up never get in."""

    def __init__(self, stats: Callable[[], Stats], adapters: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("lamella_requests", "Requests", ["route", "model", "status"], registry=self.registry)
        self.seconds = Histogram(
            "lamella_request_seconds", "From request to the end of its answer", ["route", "model"], buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "lamella_first_token_seconds", "From request to its first token", ["model"], buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter(
            "lamella_tokens", "Tokens of prompts and answers", ["model", "kind"], registry=self.registry
        )
        self.in_flight = Gauge("lamella_requests_in_flight", "Requests being answered", registry=self.registry)
        self.registry.register(_OfEngine(stats, adapters))

    def text(self) -> bytes:
        return generate_latest(self.registry)
