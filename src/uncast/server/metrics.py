"""Prometheus metrics: the engine's counters, read when they are scraped, and the latencies that clients see."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from uncast.engine.stats import EngineStats
from uncast.server.start import StartClock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAUGES = (
    ("waiting", "requests_waiting", "Requests in the queue"),
    ("max_waiting", "requests_waiting_limit", "Requests that the queue holds"),
    ("running", "requests_running", "Requests with rows in the KV pool"),
    ("swapped", "requests_swapped", "Preempted requests with their pages in host memory"),
    ("speculating", "speculating", "1 if requests that are admitted now will draft, else 0"),
    ("pool_pages", "kv_pool_pages", "Pages of the KV pool"),
    ("pool_pages_free", "kv_pool_pages_free", "Pages on the free list"),
    ("pool_pages_cached", "kv_pool_pages_cached", "Pages held by the prefix cache alone"),
)
_COUNTERS = (
    ("requests_total", "requests", "Accepted requests"),
    ("prompt_tokens_total", "prompt_tokens", "Prompt tokens of admitted requests"),
    ("completion_tokens_total", "completion_tokens", "Generated tokens"),
    ("draft_tokens_total", "draft_tokens", "Tokens that the MTP layer drafted"),
    ("draft_tokens_accepted_total", "draft_tokens_accepted", "Drafted tokens that the model chose, too"),
    ("prefix_query_tokens_total", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache"),
    ("prefix_hit_tokens_total", "prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("preemptions_total", "preemptions", "Requests swapped out to make room"),
    ("swap_bytes_total", "swap_bytes", "Bytes of pages copied out to host memory and back"),
    ("steps_total", "steps", "Forward steps"),
    ("step_seconds_total", "step_seconds", "Time in forward steps"),
    ("cache_bytes_needed_total", "kv_cache_bytes_needed", "Cache bytes that attention had to read, over all layers"),
    ("cache_bytes_read_total", "kv_cache_bytes_read", "Bytes that the backend read of the cache and of copies of it"),
    ("cache_bytes_written_total", "kv_cache_copy_bytes_written", "Bytes of copies of the cache that the backend wrote"),
    ("saturated_total", "kv_cache_values_saturated", "Values that the cache writer clamped to the range of FP8"),
    ("subnormal_total", "kv_cache_values_subnormal", "Values that became FP8 subnormals"),
    ("nan_total", "kv_cache_values_nan", "NaN values written to the cache"),
)
_KERNELS = {"compiled": "that this process compiled", "found": "that it found compiled"}


class _EngineCollector(Collector):
    def __init__(self, read: Callable[[], EngineStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        for attribute, name, text in _GAUGES:
            yield GaugeMetricFamily(f"uncast_{name}", text, value=getattr(stats, attribute))
        used = stats.pool_pages - stats.pool_pages_free - stats.pool_pages_cached
        yield GaugeMetricFamily(
            "uncast_kv_pool_use", "Share of the pool's pages in running requests", used / stats.pool_pages
        )
        for attribute, name, text in _COUNTERS:
            yield CounterMetricFamily(f"uncast_{name}", text, value=getattr(stats, attribute))
        finished = CounterMetricFamily("uncast_requests_finished", "Finished requests by reason", labels=["reason"])
        for reason, count in sorted(stats.finished_total.items()):
            finished.add_metric([reason], count)
        yield finished


class _StartCollector(Collector):
    def __init__(self, clock: StartClock) -> None:
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        if self._clock.seconds:
            phases = GaugeMetricFamily("uncast_start_seconds", "Time of each phase of the start", labels=["phase"])
            for phase, seconds in self._clock.seconds.items():
                phases.add_metric([phase], seconds)
            yield phases
            yield GaugeMetricFamily(
                "uncast_ready_seconds", "From the start of the process until the port was open", self._clock.total
            )
        if self._clock.kernels is not None:
            for what, number in self._clock.kernels().items():
                yield CounterMetricFamily(f"uncast_kernels_{what}", f"Triton kernels {_KERNELS[what]}", number)


class Metrics:
    """The registry of one server.

    Attributes:
        ttft: seconds from the arrival of a request to its first token.
        itl: seconds between two tokens of a request.
        e2e: seconds from the arrival of a request to its end.
        responses: HTTP answers by route and status.
    """

    def __init__(self, read: Callable[[], EngineStats], start: StartClock) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(read))
        self.registry.register(_StartCollector(start))
        self.ttft = Histogram(
            "uncast_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self.itl = Histogram(
            "uncast_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=_ITL_S,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "uncast_request_seconds",
            "From the arrival of a request to its end",
            buckets=_E2E_S,
            registry=self.registry,
        )
        self.responses = Counter(
            "uncast_http_responses",
            "HTTP answers by route and status; a client that left counts as 499",
            labelnames=("route", "status"),
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
