"""An engine's metrics, beside vLLM's own under ``/metrics``. Versions are values, never labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardcast.engine.forms import EngineState

PAUSE_BUCKETS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
OUTCOMES: Final = ("activated", "kept", "not_ready")


class SwapMetrics:
    """Counts how activations end; the ``Observer`` of a swapper."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "shardcast_vllm_activations",
            "Activations by outcome: activated, kept (the old version serves), not_ready",
            ["outcome"],
            registry=registry,
        )
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        self._pause = Histogram(
            "shardcast_vllm_pause_seconds",
            "How long the engine was paused, by activation",
            buckets=PAUSE_BUCKETS,
            registry=registry,
        )

    def ended(self, outcome: str, pause_seconds: float | None) -> None:
        """Take one activation."""
        self._ended.labels(outcome).inc()
        if pause_seconds is not None:
            self._pause.observe(pause_seconds)


class StateCollector(Collector):
    """Reads the state when somebody scrapes."""

    def __init__(self, source: Any) -> None:
        """Read from an object with a ``state``.

        Args:
            source: A ``Swapper``.
        """
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges. What is not known has no sample."""
        state: EngineState = self._source.state
        served = None if state.served is None else state.served.version
        staged = None if state.staged is None else state.staged.version
        yield _gauge("served_version", "Version that is served", served)
        yield _gauge("staged_version", "Version that is staged", staged)
        yield _gauge(
            "newest_version", "Newest version of the run, as the engine was told", state.newest
        )
        yield _gauge("lag_versions", "Versions that the served one is behind", state.lag)
        yield _gauge("paused_state", "1 while paused", int(state.paused))
        yield _gauge(
            "poisoned_state", "1 while nobody knows which weights are loaded", int(state.poisoned)
        )
        bad = None if state.served is None else int(bool(state.served.nonfinite))
        yield _gauge("nonfinite_state", "1 while a tensor that is served holds NaN or Inf", bad)
        yield _gauge("ready_state", "1 while requests should be sent here", int(state.ready))
        yield _gauge("swaps_count", "Pauses since the server started", state.swap_count)
        failure = GaugeMetricFamily(
            "shardcast_vllm_last_failure_timestamp_seconds",
            "When the last failure was, by phase and code; none after a success",
            labels=["phase", "code"],
        )
        if state.last_failure is not None:
            last = state.last_failure
            failure.add_metric([last.phase, last.code], last.t / 1000)
        yield failure


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"shardcast_vllm_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family
