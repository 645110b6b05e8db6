"""Prometheus metrics of /metrics. Every app has a separate registry, because a process may hold several apps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlaforge.engine.request.output import RequestOutput
from mlaforge.serving.admission import AdmissionControl
from mlaforge.serving.async_engine import AsyncEngine

_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

# Name -> (field of EngineStats, description).
COUNTERS = {
    "mlaforge_prompt_tokens": ("prompt_tokens", "prompt tokens"),
    "mlaforge_prefix_cache_hit_tokens": ("cached_prompt_tokens", "prompt tokens reused from cached prefixes"),
    "mlaforge_generated_tokens": ("generated_tokens", "generated tokens"),
    "mlaforge_engine_steps": ("steps", "steps of the engine"),
    "mlaforge_weight_bytes_read": ("weight_bytes_read", "lower bound of the weight bytes read by steps"),
    "mlaforge_cache_bytes_read": ("cache_bytes_read", "lower bound of the cache bytes read by steps"),
    "mlaforge_preemptions": ("preemptions", "sequences that lost their blocks and are computed again"),
    "mlaforge_requests_finished": ("finished_requests", "requests that the engine finished"),
    "mlaforge_requests_non_finite": ("non_finite_requests", "requests that ended on logits with NaN or infinity"),
    "mlaforge_requests_aborted": ("aborted_requests", "aborted requests"),
    "mlaforge_tuned_kernel_hits": ("tuned_hits", "kernel calls with an entry in the tuned table"),
    "mlaforge_tuned_kernel_defaults": ("tuned_defaults", "kernel calls of operations that no table was tuned for"),
    "mlaforge_tuned_kernel_misses": ("tuned_misses", "kernel calls of a shape that the tuned table lacks"),
}
# Name -> (field of SpeculationStats, description); only with speculative decoding.
SPECULATION = {
    "mlaforge_speculation_steps": ("steps", "steps of decoding sequences that may be drafted for"),
    "mlaforge_speculation_drafted_tokens": ("drafted", "drafted tokens"),
    "mlaforge_speculation_copied_tokens": ("lookup_tokens", "drafted tokens from prompt lookup before another drafter"),
    "mlaforge_speculation_accepted_tokens": ("accepted", "accepted drafted tokens"),
    "mlaforge_speculation_tokens": ("tokens", "tokens of those steps, including the model's own"),
    "mlaforge_speculation_partial_steps": ("sparse_steps", "sparse-view steps of a sequence"),
    "mlaforge_speculation_judging_steps": ("full_steps", "full steps of a sequence that verified provisional tokens"),
    "mlaforge_speculation_pending_tokens": ("provisional", "tokens that sparse-view steps accepted"),
    "mlaforge_speculation_kept_tokens": ("confirmed", "provisional tokens that a full step accepted"),
    "mlaforge_speculation_read_for_tokens": ("bytes_tokens", "tokens of the steps whose bytes the next counters count"),
    "mlaforge_speculation_full_weight_bytes": ("full_bytes.weights", "bytes of weights that full steps read"),
    "mlaforge_speculation_full_cache_bytes": ("full_bytes.cache", "bytes of the cache that full steps read"),
    "mlaforge_speculation_partial_weight_bytes": ("sparse_bytes.weights", "weight bytes that sparse-view steps read"),
    "mlaforge_speculation_partial_cache_bytes": ("sparse_bytes.cache", "cache bytes that sparse-view steps read"),
    "mlaforge_speculation_draft_seconds": ("draft_seconds", "time of drafting"),
    "mlaforge_speculation_verify_seconds": ("verify_seconds", "time of forward passes and verification"),
    "mlaforge_speculation_step_seconds": ("seconds", "total time of the steps"),
}
GAUGES = {
    "mlaforge_requests_running": ("running", "requests in the engine's batch"),
    "mlaforge_requests_waiting": ("waiting", "requests that wait inside the engine"),
    "mlaforge_cache_blocks": ("cache_blocks", "blocks of the cache"),
    "mlaforge_cache_blocks_used": ("cache_blocks_used", "blocks in use by requests"),
    "mlaforge_cache_bytes": ("cache_bytes", "bytes of the cache"),
}


class _Gauges:
    """Collector that reads the engine and the admission control on each scrape, at no cost for steps."""

    def __init__(self, engine: AsyncEngine, admission: AdmissionControl) -> None:
        self._engine, self._admission = engine, admission

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, (field, description) in COUNTERS.items():
            yield CounterMetricFamily(name, description, getattr(stats, field))
        if stats.speculation is not None:
            for name, (field, description) in SPECULATION.items():
                yield CounterMetricFamily(name, description, attrgetter(field)(stats.speculation))
            positions = CounterMetricFamily(
                "mlaforge_speculation_accepted_tokens_per_position",
                "accepted by place in the draft",
                labels=("position",),
            )
            for position, count in enumerate(stats.speculation.accepted_at):
                positions.add_metric((str(position),), count)
            yield positions
        for name, (field, description) in GAUGES.items():
            yield GaugeMetricFamily(name, description, getattr(stats, field))
        if (ratio := stats.tuned_ratio) is not None:
            yield GaugeMetricFamily("mlaforge_tuned_kernel_ratio", "share of kernel calls with a tuned entry", ratio)
        usage = stats.cache_blocks_used / stats.cache_blocks if stats.cache_blocks else 0.0
        yield GaugeMetricFamily("mlaforge_cache_usage_ratio", "share of the blocks in use by requests", usage)
        queued = self._admission.admitted - self._admission.running
        yield GaugeMetricFamily("mlaforge_http_requests_queued", "requests that wait for a slot", queued)
        up = self._engine.unavailable is None
        yield GaugeMetricFamily("mlaforge_engine_up", "1 while the engine accepts requests", float(up))


class Metrics:
    """Counters and histograms of one app."""

    def __init__(self, engine: AsyncEngine, admission: AdmissionControl) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(engine, admission))
        self._requests = Counter("mlaforge_requests", "HTTP requests", ("endpoint", "status"), registry=registry)
        self._latency = Histogram(
            "mlaforge_request_seconds", "arrival to end of an answer", buckets=_REQUEST, registry=registry
        )
        self._first_token = Histogram(
            "mlaforge_time_to_first_token_seconds", "arrival to first token", buckets=_REQUEST, registry=registry
        )
        self._inter_token = Histogram(
            "mlaforge_inter_token_seconds", "between the tokens of an answer", buckets=_STEP, registry=registry
        )
        self._last: dict[tuple[str, int], float] = {}  # choice -> time of its last token
        engine.on_output = self.record_output

    def record_output(self, arrived: float, output: RequestOutput, now: float) -> None:
        """Record the token latencies of an output; times in seconds of time.perf_counter()."""
        for new in output.outputs:
            choice = (output.request_id, new.index)
            count = len(new.token_ids)
            if count:
                if choice not in self._last:
                    self._first_token.observe(now - arrived)
                    count -= 1
                for _ in range(count):
                    self._inter_token.observe((now - self._last.get(choice, now)) / len(new.token_ids))
                self._last[choice] = now
            if new.finish_reason is not None:
                self._last.pop(choice, None)

    def record_request(self, endpoint: str, status: int, arrived: float, request_ids: list[str], n: int) -> None:
        """Record the end of a request; status 499 if the client disconnected first."""
        self._requests.labels(endpoint, str(status)).inc()
        if status == 200:
            self._latency.observe(time.perf_counter() - arrived)
        for request_id in request_ids:
            for index in range(n):
                self._last.pop((request_id, index), None)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))
