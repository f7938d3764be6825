"""What /metrics tells, in Prometheus' names and units.

Counters and histograms of requests are prometheus_client's, kept by the frontend that serves them; with several frontend
processes they live in prometheus_client's multiprocess files and are summed when scraped. The engine's numbers come
with the step outputs, the same to every frontend, and are shown as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from spmd_serve.types import FinishReason, StepStats

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class _EngineCollector(Collector):
    """The latest StepStats."""

    def __init__(self) -> None:
        self.stats = StepStats()

    def collect(self) -> Iterator[Metric]:
        s = self.stats
        used = s.pages_total - s.pages_free - s.pages_cached
        for name, text, value in (
            ("requests_running", "Sequences that are being computed", s.running),
            (
                "requests_waiting",
                "Sequences that wait to be computed, for the first time or after a preemption",
                s.waiting,
            ),
            ("kv_usage_ratio", "Share of the KV pool that running sequences hold", used / max(1, s.pages_total)),
            ("step", "Number of the latest step", s.step),
        ):
            yield GaugeMetricFamily(f"spmd_serve_{name}", text, value=value)
        pages = GaugeMetricFamily("spmd_serve_kv_pages", "Pages of the KV pool by state", labels=["state"])
        for state, count in (("used", used), ("cached", s.pages_cached), ("free", s.pages_free)):
            pages.add_metric([state], count)
        yield pages
        text = "Last exchange of each rank, sampled; the slowest rank waits least in it"
        exchange = GaugeMetricFamily("spmd_serve_rank_exchange_seconds", text, labels=["rank"])
        for rank, seconds in enumerate(s.rank_exchange_times):
            exchange.add_metric([str(rank)], seconds)
        yield exchange
        for name, text, value in (
            ("preemptions", "Sequences that were put back to wait", s.preempted_total),
            ("prompt_tokens", "Prompt tokens of sequences whose prompt has been computed", s.prompt_tokens_total),
            ("prompt_tokens_cached", "Those of them that were found in the prefix cache", s.cached_tokens_total),
            ("generation_tokens", "Tokens generated", s.generation_tokens_total),
        ):
            yield CounterMetricFamily(f"spmd_serve_{name}", text, value=value)


class Metrics:
    """One frontend's metrics.

    Args:
        first: True for the first frontend, which alone observes steps (all frontends see the same ones).
        shared: the values of several processes are summed, through the files in MULTIPROCESS_VARIABLE's folder.

    Attributes:
        intervals: time of a choice's previous token -> how many choices got their next one now; emptied by
            `flush_intervals`. The tokens of one step share that time, so this is one entry for many tokens.
    """

    def __init__(self, *, first: bool = True, shared: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._first = first
        self._shared = shared
        self._engine = _EngineCollector()
        finished = Counter(
            "spmd_serve_requests", "Sequences that ended, by outcome", ["outcome"], registry=self._registry
        )
        self._by_reason = {reason: finished.labels(reason.value) for reason in FinishReason}
        self._responses = Counter(
            "spmd_serve_http_responses", "HTTP responses by status", ["status"], registry=self._registry
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"spmd_serve_{name}", text, labels, buckets=buckets, registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", "From submission to the first token", _LATENCY)
        self.duration = histogram("request_duration_seconds", "From submission to the end of a request", _LATENCY)
        self._inter_token = histogram("inter_token_seconds", "Between a sequence's tokens", _LATENCY)
        self._step = histogram("step_seconds", "Time of a step that computes, without its exchange", _STEP)
        exchange = histogram(
            "exchange_seconds",
            "Time in the control exchange of a step that computes; some decode steps have none",
            _STEP,
            ("rank",),
        )
        self._exchange_of_rank0 = exchange.labels("0")
        self.intervals: dict[float, int] = {}

    def count_finish(self, reason: FinishReason) -> None:
        """One sequence has ended."""
        self._by_reason[reason].inc()

    def count_response(self, status: int) -> None:
        """One HTTP response has begun."""
        self._responses.labels(str(status)).inc()

    def set_stats(self, stats: StepStats) -> None:
        """Take a step's statistics."""
        self._engine.stats = stats
        if self._first and stats.step_time > 0.0:
            self._step.observe(stats.step_time)
            if stats.exchange_time > 0.0:  # decode steps may go without
                self._exchange_of_rank0.observe(stats.exchange_time)

    def flush_intervals(self, now: float) -> None:
        """Count the intervals that end at `now`."""
        if self.intervals:
            for previous, count in self.intervals.items():
                _observe_many(self._inter_token, now - previous, count)
            self.intervals.clear()

    def render(self) -> bytes:
        """The exposition text."""
        registry = CollectorRegistry()
        registry.register(self._engine)
        if self._shared:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return bytes(generate_latest(registry))
        return bytes(generate_latest(registry)) + bytes(generate_latest(self._registry))


def _observe_many(histogram: Histogram, value: float, count: int) -> None:
    """`histogram.observe(value)`, `count` times.

    prometheus_client has no such call, and observing each token by itself would cost a tenth of what a token may.
    """
    histogram._sum.inc(value * count)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)
