"""What an agent counts (Prometheus), in a registry of its own."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shardcast.engine.decide import served_by
from shardcast.engine.forms import EngineState

_PAUSE_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STAGE_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineMetrics:
    """An agent's gauges and counters. Engines are told apart by their URL.

    What an engine says is a gauge for as long as it answers: ``reachable`` and ``ready`` are 0 where it
    does not, and the others are gone, so that no alert rests on what was true once. ``lag_versions`` is
    there where it is known: not while nobody knows what is served, nor where that is of another run.
    """

    def __init__(self, run: str) -> None:
        """Nothing has been seen.

        Args:
            run: The run; versions of others are none of ours.
        """
        self._run = run
        self.registry = CollectorRegistry()
        self.reachable = self._gauge("reachable", "Whether the engine answers")
        self.ready = self._gauge("ready", "Whether the engine says that it is ready")
        self.paused = self._gauge("paused", "Whether the engine is paused")
        self.poisoned = self._gauge(
            "poisoned", "Whether nobody knows which weights the engine has loaded"
        )
        self.nonfinite = self._gauge(
            "nonfinite", "Whether a tensor that the engine serves holds NaN or an infinity"
        )
        self.served = self._gauge(
            "served_version", "Version that the engine serves; 0: none of ours"
        )
        self.staged = self._gauge(
            "staged_version", "Version that the engine has staged; 0: none of ours"
        )
        self.lag = self._gauge("lag_versions", "Versions that the engine is behind the run")
        self.failed_at = Gauge(
            "shardcast_engine_failure_timestamp_seconds",
            "When the engine failed last, by the phase it failed in",
            ["engine", "phase"],
            registry=self.registry,
        )
        self.failures = Counter(
            "shardcast_engine_failures",
            "What an engine failed at, by phase",
            ["engine", "phase"],
            registry=self.registry,
        )
        self.activations = Counter(
            "shardcast_engine_activations",
            "Versions that the engine was seen to begin to serve",
            ["engine"],
            registry=self.registry,
        )
        self.pause_seconds = Histogram(
            "shardcast_engine_pause_seconds",
            "How long the engine was paused for an activation",
            ["engine"],
            buckets=_PAUSE_SECONDS,
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "shardcast_engine_stage_seconds",
            "How long the engine took to verify a version and hold it",
            ["engine"],
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self.newest = Gauge(
            "shardcast_agent_newest_version", "Newest version of the run", registry=self.registry
        )
        self.current = Gauge(
            "shardcast_agent_current_version",
            "Version that is current on this disk",
            registry=self.registry,
        )

        self.repairs = Counter(
            "shardcast_agent_repairs",
            "Versions that were looked at because an engine called them damaged, by what came of it",
            ["outcome"],
            registry=self.registry,
        )

    def seen(self, engine: str, state: EngineState | None, newest: int | None) -> None:
        """Take what an engine says, or that it says nothing.

        Args:
            engine: Its URL.
            state: What it says; None where it does not answer.
            newest: How far the run is.
        """
        self.reachable.labels(engine).set(state is not None)
        if state is None:
            self.ready.labels(engine).set(0)
            for gauge in (
                self.paused, self.poisoned, self.nonfinite, self.served, self.staged, self.lag
            ):  # fmt: skip
                _remove(gauge, engine)
            return
        served, staged = served_by(state), state.staged
        if served is not None and served.run != self._run:
            served = None
        if staged is not None and staged.run != self._run:
            staged = None
        self.ready.labels(engine).set(state.ready)
        self.paused.labels(engine).set(state.paused)
        self.poisoned.labels(engine).set(state.poisoned)
        bad = state.served is not None and bool(state.served.nonfinite)
        self.nonfinite.labels(engine).set(bad)
        self.served.labels(engine).set(0 if served is None else served.version)
        self.staged.labels(engine).set(0 if staged is None else staged.version)
        if served is None or newest is None:
            _remove(self.lag, engine)
        else:
            self.lag.labels(engine).set(max(newest - served.version, 0))

    def failed(self, engine: str, phase: str) -> None:
        """An engine failed."""
        self.failures.labels(engine, phase).inc()
        self.failed_at.labels(engine, phase).set(time.time())

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"shardcast_engine_{name}", text, ["engine"], registry=self.registry)


def _remove(gauge: Gauge, engine: str) -> None:
    with suppress(KeyError):  # some releases of prometheus_client raise where there is none
        gauge.remove(engine)
