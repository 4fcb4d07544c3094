"""What is told of one engine: events and metrics, the same failure only once in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Failure, Identity
from shardcast.engine.metrics import EngineMetrics
from shardcast.errors import EngineError, EngineRefusedError, ShardcastError
from shardcast.events import EventKind, WorkerEvent

AWAY: Final = "serve"
"""The phase of an engine that does not answer at all."""


class Reports:
    """Tells of one engine."""

    def __init__(
        self, engine: str, run: str, emit: Callable[[WorkerEvent], None], metrics: EngineMetrics
    ) -> None:
        """Tell nothing yet.

        Args:
            engine: Its URL.
            run: The run.
            emit: Takes events.
            metrics: Counts.
        """
        self._engine = engine
        self._run = run
        self._emit = emit
        self._metrics = metrics
        self._last: str | None = None
        self._away = False

    def staged(self, target: Target, seconds: float) -> None:
        """The engine has staged a version."""
        self._metrics.stage_seconds.labels(self._engine).observe(seconds)
        self._tell(EventKind.STAGED, target)
        self._last = None

    def activated(self, identity: Identity, step: int | None, pause_ms: float | None) -> None:
        """The engine serves a version."""
        self._metrics.activations.labels(self._engine).inc()
        if pause_ms is not None:
            self._metrics.pause_seconds.labels(self._engine).observe(pause_ms / 1000)
        self._emit(
            WorkerEvent(
                kind=EventKind.ACTIVATED,
                run=identity.run,
                version=identity.version,
                step=step,
                manifest=identity.digest,
                engine=self._engine,
                pause_ms=pause_ms,
            )
        )
        self._last = None

    def loaded(self, target: Target, model: str | None) -> None:
        """The engine has an adapter; requests name it ``model``."""
        self._metrics.activations.labels(self._engine).inc()
        self._tell(EventKind.ACTIVATED, target, model=model)
        self._last = None

    def failed(self, error: EngineError, phase: str, target: Target | None = None) -> None:
        """The engine failed."""
        self._metrics.failed(self._engine, phase)
        if self._last != error.message:
            self._last = error.message
            self._tell(EventKind.ENGINE_FAILED, target, error=error)

    def away(self, error: EngineError) -> None:
        """The engine does not answer."""
        self._away = True
        self.failed(error, AWAY)

    def back(self) -> bool:
        """The engine answers; say whether it did not before. If it does not once more, that is told."""
        if not self._away:
            return False
        self._away, self._last = False, None
        return True

    def _tell(
        self,
        kind: EventKind,
        target: Target | None,
        *,
        error: ShardcastError | None = None,
        model: str | None = None,
    ) -> None:
        self._emit(
            WorkerEvent(
                kind=kind,
                run=self._run,
                version=None if target is None else target.version,
                step=None if target is None else target.step,
                manifest=None if target is None else target.digest,
                path=None if target is None else target.path,
                engine=self._engine,
                model=model,
                error=error,
            )
        )


# --- what no answer said ----------------------------------------------------------------------


def missed(engine: str, target: Target, state: EngineState) -> EngineRefusedError:
    """Return the error of an engine that serves something else than it was told to, without a word."""
    why = state.last_failure
    said = f": {why.message}" if why is not None else ""
    return EngineRefusedError(
        f"engine {engine} did not activate version {target.version}{said}",
        source=engine,
        phase="activate" if why is None else why.phase,
        reason="failed",
    )


def failed_there(engine: str, failure: Failure) -> EngineRefusedError:
    """Return the error of a failure that an engine tells of: of what somebody else told it to do."""
    return EngineRefusedError(
        f"engine {engine}: {failure.message}",
        source=engine,
        phase=failure.phase,
        reason=failure.code,
    )


def unlike_canary(
    engine: str, identity: Identity, why: str, back: Target | None
) -> EngineRefusedError:
    """Return the error of an engine that answers otherwise than a version's canary."""
    where = (
        "it serves it on: activate another version"
        if back is None
        else f"it goes back to version {back.version}"
    )
    return EngineRefusedError(
        f"engine {engine} does not answer as the canary of version {identity.version} says: {why}; "
        f"{where}",
        source=engine,
        phase="check",
        reason="failed",
    )
