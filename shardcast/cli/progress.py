"""Progress of long work: a bar with bytes, rate and time left, lines, or events.

A bar is drawn on a terminal (stderr); a line every few seconds stands for it elsewhere; with
``--json`` it becomes ``progress`` events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from shardcast.cli.output import Output
from shardcast.cli.units import duration, rate, size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S: Final = 5.0
EVENT_EVERY_S: Final = 0.25
RATE_OVER_S: Final = 10.0
"""Rates are those of the last seconds: a transfer that stands still says so."""


class Meter(Protocol):
    """One piece of work that is measured in bytes. Thread-safe."""

    def update(self, done: int, total: int | None = None) -> None:
        """Say how many bytes are done in all (and how many there are, once that is known)."""
        ...

    def finish(self) -> None:
        """Say that it is over."""
        ...


class Meters(Protocol):
    """Something that shows meters; a context manager."""

    def start(self, label: str, total: int | None = None, **members: object) -> Meter:
        """Begin a meter; ``members`` go into its events."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def meters(out: Output) -> Meters:
    """Return what shows progress where this output goes."""
    if out.json:
        return LineMeters(out, EVENT_EVERY_S, time.monotonic)
    if out.terminal:
        return BarMeters()
    return LineMeters(out, LINE_EVERY_S, time.monotonic)


class LineMeters:
    """Progress as a line (or event) now and then: nothing for work that is over sooner."""

    def __init__(self, out: Output, every_s: float, clock: Callable[[], float]) -> None:
        """Say something about a meter every ``every_s`` seconds of ``clock``."""
        self._out = out
        self._every_s = every_s
        self._clock = clock

    def start(self, label: str, total: int | None = None, **members: object) -> Meter:
        """Begin a meter."""
        return _LineMeter(self._out, self._every_s, self._clock, label, total, members)

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to close."""


class _LineMeter:
    def __init__(
        self,
        out: Output,
        every_s: float,
        clock: Callable[[], float],
        label: str,
        total: int | None,
        members: dict[str, object],
    ) -> None:
        self._out = out
        self._every_s = every_s
        self._clock = clock
        self._label = label
        self._total = total
        self._members = members
        self._said = clock()
        self._recent: list[tuple[float, int]] = []
        self._moved = self._said, 0
        self._lock = threading.Lock()

    def update(self, done: int, total: int | None = None) -> None:
        with self._lock:
            if total is not None:
                self._total = total
            now = self._clock()
            if not self._recent:
                self._recent.append((self._said, done))
                self._moved = self._said, done
            if done != self._moved[1]:
                self._moved = now, done
            if now - self._said < self._every_s:
                return
            self._said = now
            self._recent.append((now, done))
            while len(self._recent) > 2 and now - self._recent[1][0] >= RATE_OVER_S:
                del self._recent[0]
            began, first = self._recent[0]
            still = now - self._moved[0]
        seconds, moved = now - began, done - first
        if self._out.json:
            self._out.event(
                "progress",
                **self._members,
                what=self._label,
                bytes=done,
                bytes_total=self._total,
                bytes_per_s=round(moved / seconds) if seconds > 0 else None,
            )
            return
        self._out.notice(self._line(done, moved, seconds, still))

    def _line(self, done: int, moved: int, seconds: float, still: float) -> str:
        text = f"{self._label}: {size(done)}"
        if self._total:
            text += f" of {size(self._total)} ({100 * done / self._total:.0f} %)"
        stands = not moved and len(self._recent) > 2
        text += f", nothing for {duration(still)}" if stands else f", {rate(moved, seconds)}"
        if self._total and moved > 0:
            left = (self._total - done) * seconds / moved
            text += f", {duration(max(left, 0.0))} left"
        return text

    def finish(self) -> None:
        pass


class BarMeters:
    """Progress as bars at the bottom of a terminal."""

    def __init__(self) -> None:
        """Prepare the display; nothing is drawn before a meter starts."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress: RichProgress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )

    def start(self, label: str, total: int | None = None, **members: object) -> Meter:
        """Begin a bar."""
        return _Bar(self._progress, self._progress.add_task(label, total=total))

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the bars."""
        self._progress.stop()


class _Bar:
    def __init__(self, progress: RichProgress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def update(self, done: int, total: int | None = None) -> None:
        if total is None:
            self._progress.update(self._task, completed=done)
        else:
            self._progress.update(self._task, completed=done, total=total)

    def finish(self) -> None:
        self._progress.remove_task(self._task)


class Counter:
    """Adds up what several threads report and feeds one meter."""

    def __init__(self, shown: Meters, label: str, **members: object) -> None:
        """The meter starts when the total is known."""
        self._shown = shown
        self._label = label
        self._members = members
        self._meter: Meter | None = None
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.done = 0

    def begin(self, total: int | None) -> None:
        """Start counting towards ``total`` bytes."""
        with self._lock:
            self._meter = self._shown.start(self._label, total, **self._members)
            self._began = time.monotonic()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes."""
        with self._lock:
            self.done += count
            done, meter = self.done, self._meter
        if meter is not None:
            meter.update(done)

    def finish(self) -> None:
        """Remove the meter."""
        if self._meter is not None:
            self._meter.finish()

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._began
