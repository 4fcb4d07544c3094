"""What ``pull`` and ``follow`` show: a worker's events as bars, lines or JSON."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from shardcast.cli.output import Output
from shardcast.cli.progress import Meter, Meters
from shardcast.cli.units import duration, rate, size
from shardcast.errors import said_of

if TYPE_CHECKING:
    from shardcast.errors import ShardcastError
    from shardcast.events import WorkerEvent

_QUIET_KINDS: Final = frozenset({"progress", "started"})
"""Shown by the meters."""


_NOTICES: Final = {
    "held": "{name} is here; the publisher holds activations",
    "waiting": "{error}",
    "superseded": "{name} was left for a newer one; what it had is kept",
}


class WorkerView:
    """Hears a worker's events, from any thread, one at a time.

    Attributes:
        committed: The versions that were said to be committed.
    """

    def __init__(self, out: Output, shown: Meters) -> None:
        """Show events through ``out`` and progress in ``shown``."""
        self._out = out
        self._shown = shown
        self._lock = threading.Lock()
        self._meters: dict[int, Meter] = {}
        self._began: dict[int, float] = {}
        self._told: set[tuple[str | None, str]] = set()
        self.committed: set[int] = set()

    def on_event(self, event: WorkerEvent) -> None:
        """Show one event."""
        with self._lock:
            kind = str(event.kind)
            self._measure(kind, event)
            if kind == "committed" and event.version is not None:
                self.committed.add(event.version)
            if kind not in _QUIET_KINDS:
                self._emit(kind, event)
            self._say(kind, event)

    def _measure(self, kind: str, event: WorkerEvent) -> None:
        number = event.version
        if number is None:
            return
        if kind == "started":
            self._began[number] = time.monotonic()
            self._meters[number] = self._shown.start(
                f"{event.run} version {number}",
                event.bytes_total,
                run=event.run,
                version=number,
            )
            self._meters[number].update(event.bytes_done or 0)
        elif kind == "progress" and number in self._meters:
            self._meters[number].update(event.bytes_done or 0, event.bytes_total)
        elif kind in ("ready", "superseded") and number in self._meters:
            self._meters.pop(number).finish()

    def _emit(self, kind: str, event: WorkerEvent) -> None:
        members: dict[str, object] = {
            "run": event.run,
            "version": event.version,
            "step": event.step,
            "manifest": event.manifest,
            "path": None if event.path is None else str(event.path.absolute()),
            "bytes_fetched": event.bytes_fetched,
        }
        if event.bytes_hedged is not None:
            members["bytes_hedged"] = event.bytes_hedged
        if event.bytes_delta is not None:
            members["bytes_delta"] = event.bytes_delta
            members["via"] = list(event.via)
            members["bytes_ahead"] = event.bytes_ahead
        if event.engine is not None:
            members["engine"] = event.engine
        if kind == "activated":
            members["pause_ms"] = event.pause_ms
            members |= {} if event.model is None else {"model": event.model}
        if event.error is not None:
            members |= {"code": event.error.code, "message": event.error.message}
        if event.error is not None or event.source is not None:
            members["source"] = event.source or (event.error.source if event.error else None)
        self._out.event(kind, t=event.t, **members)

    def _say(self, kind: str, event: WorkerEvent) -> None:
        name = f"{event.run} version {event.version}"
        if event.step is not None:
            name += f" (step {event.step})"
        if kind == "ready":
            self._say_ready(name, event)
        elif kind == "committed":
            self._out.result(f"committed  {name}: {event.path}")
        elif kind == "repaired":
            self._say_repaired(name, event)
        elif event.engine is not None:
            self._say_engine(kind, name, event)
        elif kind in _NOTICES:
            self._out.notice(_NOTICES[kind].format(name=name, error=event.error))
        elif kind == "damaged":
            self._out.warning(f"{name}: {event.error}; fetched again")
        elif kind == "frozen":
            self._out.warning(f"run {event.run}: {event.error or 'the head has expired'}")
        elif kind == "thawed":
            self._out.notice(f"run {event.run}: a fresh head came")
        elif kind in ("source", "banned"):
            self._say_once(event.source, _said(event.source, event.error))
        elif kind in ("error", "delta_failed", "engine_failed"):
            self._out.warning(f"{event.error}")

    def _say_repaired(self, name: str, event: WorkerEvent) -> None:
        self._out.notice(
            f"repaired   {name}: {event.path}, {size(event.bytes_fetched or 0)} fetched"
        )

    def _say_engine(self, kind: str, name: str, event: WorkerEvent) -> None:
        if kind == "staged":
            self._out.notice(f"staged     {name}: {event.engine}")
        elif kind == "activated":
            self._out.result(f"activated  {name}: {event.engine}{_paused(event)}")
        else:
            self._out.warning(f"{event.error}")

    def _say_ready(self, name: str, event: WorkerEvent) -> None:
        seconds = time.monotonic() - self._began.pop(event.version or 0, time.monotonic())
        fetched = event.bytes_fetched or 0
        late = fetched - (event.bytes_ahead or 0)  # what came ahead took other seconds
        how = f", {size(fetched)} fetched ({rate(late, seconds)})" if fetched else ""
        if event.bytes_delta:
            how += f", {size(event.bytes_delta)} of it deltas"
        if event.bytes_ahead:
            how += f", {size(event.bytes_ahead)} before it was announced whole"
        if event.via:
            how += f", by way of version {', '.join(map(str, event.via))}"
        self._out.result(f"ready      {name} after {duration(seconds)}{how}")

    def _say_once(self, source: str | None, text: str) -> None:
        """A source that is down says the same a hundred times."""
        if (source, text) not in self._told:
            self._told.add((source, text))
            self._out.notice(text)


def _paused(event: WorkerEvent) -> str:
    how = "" if event.model is None else f", as model {event.model}"
    return how if event.pause_ms is None else f"{how}, paused {duration(event.pause_ms / 1000)}"


def _said(source: str | None, error: ShardcastError | None) -> str:
    return f"{source}: {error}" if source is None or error is None else said_of(source, error)
