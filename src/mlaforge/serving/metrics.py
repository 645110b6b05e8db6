"""Prometheus metrics, as /metrics exposes them. Every app has its own registry: several live in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlaforge.engine.request.output import RequestOutput
from mlaforge.serving.admission import AdmissionControl
from mlaforge.serving.async_engine import AsyncEngine

_STEP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_REQUEST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

# Name -> (field of EngineStats, what it counts).
COUNTERS = {
    "mlaforge_prompt_tokens": ("prompt_tokens", "tokens of prompts"),
    "mlaforge_prefix_cache_hit_tokens": ("cached_prompt_tokens", "tokens of prompts that a cached prefix saved"),
    "mlaforge_generated_tokens": ("generated_tokens", "tokens generated"),
    "mlaforge_engine_steps": ("steps", "steps of the engine"),
    "mlaforge_weight_bytes_read": ("weight_bytes_read", "bytes of weights that steps read at the least"),
    "mlaforge_cache_bytes_read": ("cache_bytes_read", "bytes of the cache that steps read at the least"),
    "mlaforge_preemptions": ("preemptions", "sequences that lost their blocks and are computed again"),
    "mlaforge_requests_finished": ("finished_requests", "requests that the engine finished"),
    "mlaforge_requests_non_finite": ("non_finite_requests", "requests that ended on logits with NaN or infinity"),
    "mlaforge_requests_aborted": ("aborted_requests", "requests that were aborted"),
}
# Name -> (field of SpeculationStats, what it counts); only where the engine drafts.
SPECULATION = {
    "mlaforge_speculation_steps": ("steps", "steps of decoding sequences that may be drafted for"),
    "mlaforge_speculation_drafted_tokens": ("drafted", "tokens drafted"),
    "mlaforge_speculation_copied_tokens": ("lookup_tokens", "drafted tokens from prompt lookup before another drafter"),
    "mlaforge_speculation_accepted_tokens": ("accepted", "drafted tokens that were accepted"),
    "mlaforge_speculation_tokens": ("tokens", "tokens of those steps, the model's own among them"),
    "mlaforge_speculation_partial_steps": ("sparse_steps", "sparse-view steps of a sequence"),
    "mlaforge_speculation_judging_steps": ("full_steps", "full steps of a sequence that verified provisional tokens"),
    "mlaforge_speculation_pending_tokens": ("provisional", "tokens that sparse-view steps accepted"),
    "mlaforge_speculation_kept_tokens": ("confirmed", "provisional tokens that a full step accepted"),
    "mlaforge_speculation_read_for_tokens": ("bytes_tokens", "tokens of those steps that read the bytes below"),
    "mlaforge_speculation_full_weight_bytes": ("full_weight_bytes", "bytes of weights that full steps read"),
    "mlaforge_speculation_full_cache_bytes": ("full_cache_bytes", "bytes of the cache that full steps read"),
    "mlaforge_speculation_partial_weight_bytes": (
        "sparse_weight_bytes",
        "bytes of weights that sparse-view steps read",
    ),
    "mlaforge_speculation_partial_cache_bytes": (
        "sparse_cache_bytes",
        "bytes of the cache that sparse-view steps read",
    ),
    "mlaforge_speculation_draft_seconds": ("draft_seconds", "time spent on drafting"),
    "mlaforge_speculation_verify_seconds": ("verify_seconds", "time spent on forward passes and verification"),
    "mlaforge_speculation_step_seconds": ("seconds", "time of the steps as a whole"),
}
GAUGES = {
    "mlaforge_requests_running": ("running", "requests in the engine's batch"),
    "mlaforge_requests_waiting": ("waiting", "requests that wait inside the engine"),
    "mlaforge_cache_blocks": ("cache_blocks", "blocks of the cache"),
    "mlaforge_cache_blocks_used": ("cache_blocks_used", "blocks that requests hold"),
    "mlaforge_cache_bytes": ("cache_bytes", "bytes of the cache"),
}


class _Gauges:
    """Reads the engine and its admission control when Prometheus asks, so that steps pay nothing."""

    def __init__(self, engine: AsyncEngine, admission: AdmissionControl) -> None:
        self._engine, self._admission = engine, admission

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for name, (field, description) in COUNTERS.items():
            yield CounterMetricFamily(name, description, getattr(stats, field))
        if stats.speculation is not None:
            for name, (field, description) in SPECULATION.items():
                yield CounterMetricFamily(name, description, getattr(stats.speculation, field))
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
        usage = stats.cache_blocks_used / stats.cache_blocks if stats.cache_blocks else 0.0
        yield GaugeMetricFamily("mlaforge_cache_usage_ratio", "share of the blocks that requests hold", usage)
        queued = self._admission.admitted - self._admission.running
        yield GaugeMetricFamily("mlaforge_http_requests_queued", "requests that wait for a place", queued)
        up = self._engine.unavailable is None
        yield GaugeMetricFamily("mlaforge_engine_up", "1 while the engine takes requests", float(up))


class Metrics:
    """Counters and histograms of one app."""

    def __init__(self, engine: AsyncEngine, admission: AdmissionControl) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(engine, admission))
        self._requests = Counter("mlaforge_requests", "HTTP requests", ("endpoint", "status"), registry=registry)
        self._whole = Histogram(
            "mlaforge_request_seconds", "arrival to end of an answer", buckets=_REQUEST, registry=registry
        )
        self._first = Histogram(
            "mlaforge_time_to_first_token_seconds", "arrival to first token", buckets=_REQUEST, registry=registry
        )
        self._between = Histogram(
            "mlaforge_inter_token_seconds", "between the tokens of an answer", buckets=_STEP, registry=registry
        )
        self._last: dict[tuple[str, int], float] = {}  # choice -> when its last token came
        engine.on_output = self.saw_output

    def saw_output(self, arrived: float, output: RequestOutput, now: float) -> None:
        """Times of an output's tokens; all in seconds of time.perf_counter()."""
        for new in output.outputs:
            choice = (output.request_id, new.index)
            count = len(new.token_ids)
            if count:
                if choice not in self._last:
                    self._first.observe(now - arrived)
                    count -= 1
                for _ in range(count):
                    self._between.observe((now - self._last.get(choice, now)) / len(new.token_ids))
                self._last[choice] = now
            if new.finish_reason is not None:
                self._last.pop(choice, None)

    def ended(self, endpoint: str, status: int, arrived: float, request_ids: list[str], n: int) -> None:
        """A request is over; status 499 where the client went first."""
        self._requests.labels(endpoint, str(status)).inc()
        if status == 200:
            self._whole.observe(time.perf_counter() - arrived)
        for request_id in request_ids:
            for index in range(n):
                self._last.pop((request_id, index), None)

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))
