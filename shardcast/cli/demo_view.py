"""What the demonstration shows: a live tree on a terminal, else lines, else events."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from shardcast.cli.output import Output
from shardcast.cli.units import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardcast.demo.scenario import VersionResult

_TREE: Final = (
    ("origin", "origin"),
    ("relay-1", "├─ relay-1"),
    ("relay-2", "└─ relay-2"),
    ("worker-1", "   ├─ worker-1"),
    ("relay-3", "   └─ relay-3"),
    ("worker-2", "      ├─ worker-2"),
    ("worker-3", "      └─ worker-3"),
)
_LEGEND: Final = "relay-1 and relay-2 are siblings; worker-1 and relay-3 fetch from both"


class LineView:
    """One line (or event) for each thing that happened."""

    def __init__(self, out: Output) -> None:
        """Say it through ``out``."""
        self._out = out

    def doing(self, what: str) -> None:
        """A new act begins."""
        self._out.notice(f"{what} ...")

    def joined(self, name: str, url: str | None) -> None:
        """A process is up."""
        self._out.event("joined", node=name, url=url)
        self._out.detail(f"{name} is up{f' at {url}' if url else ''}")

    def published(self, result: VersionResult) -> None:
        """A version was announced."""
        self._out.event(
            "demo_published",
            version=result.version,
            bytes=result.bytes,
            seconds=result.publish_s,
            changed=result.changed,
            delta_bytes=result.delta_bytes,
        )
        changed = "" if result.changed is None else f", {100 * result.changed:.2f} % changed"
        if result.delta_bytes is not None:
            changed += f", {size(result.delta_bytes)} as a delta"
        self._out.result(
            f"version {result.version}: published {size(result.bytes)} in "
            f"{duration(result.publish_s)}{changed}"
        )

    def progress(self, name: str, version: int, done: int, total: int) -> None:
        """A worker came further; too much for lines."""

    def ready(self, name: str, result: VersionResult) -> None:
        """A worker holds a version."""
        self._out.event(
            "demo_ready",
            node=name,
            version=result.version,
            seconds=result.ready_s[name],
            bytes_fetched=result.fetched[name],
            bytes_delta=result.by_delta[name],
        )
        self._out.result(
            f"version {result.version}: {name} ready {duration(result.ready_s[name])} "
            f"after the announcement, {size(result.fetched[name])} fetched"
        )

    def compared(self, result: VersionResult) -> None:
        """Directories were compared."""
        self._out.event(
            "demo_compared", version=result.version, files=result.files, equal=result.equal
        )
        for name, equal in result.equal.items():
            if not equal:
                self._out.result(f"version {result.version}: {name} DIFFERS from the source")
        if all(result.equal.values()):
            self._out.result(
                f"version {result.version}: all {result.files} files equal on "
                f"{len(result.equal)} workers"
            )


class LiveView:
    """The tree with each worker's progress, drawn anew a few times a second."""

    def __init__(self) -> None:
        """Draw nothing yet; ``render`` is what a rich ``Live`` asks."""
        self._lock = threading.Lock()
        self._act = ""
        self._began = time.monotonic()
        self._state = {name: "waiting" for name, _ in _TREE}
        self._done: dict[str, tuple[int, int]] = {}
        self._result: VersionResult | None = None
        self._history: list[str] = []

    def doing(self, what: str) -> None:
        """A new act begins."""
        with self._lock:
            self._act = what

    def joined(self, name: str, url: str | None) -> None:
        """A process is up."""
        with self._lock:
            self._state[name] = url or "following"

    def published(self, result: VersionResult) -> None:
        """A version was announced."""
        with self._lock:
            self._result = result
            self._done = {name: (0, result.bytes) for name in self._state if "worker" in name}
            self._done |= dict.fromkeys(result.ready_s, (result.bytes, result.bytes))
            for name in result.ready_s:
                self._state[name] = self._ready_text(name, result)

    def progress(self, name: str, version: int, done: int, total: int) -> None:
        """A worker came further."""
        with self._lock:
            if self._result is None or version >= self._result.version:
                self._done[name] = (done, total)
                self._state[name] = f"version {version}"

    def ready(self, name: str, result: VersionResult) -> None:
        """A worker holds a version."""
        with self._lock:
            self._done[name] = (result.bytes, result.bytes)
            self._state[name] = self._ready_text(name, result)

    def compared(self, result: VersionResult) -> None:
        """Directories were compared."""
        equal = "equal" if all(result.equal.values()) else "NOT EQUAL"
        slowest = max(result.ready_s.values(), default=0.0)
        with self._lock:
            self._history.append(
                f"version {result.version}: published in {duration(result.publish_s)}, last ready "
                f"{duration(slowest)} later, {size(result.wire_bytes)} a worker, "
                f"{result.files} files {equal}"
            )

    def _ready_text(self, name: str, result: VersionResult) -> str:
        seconds = result.ready_s[name]
        return f"ready {duration(seconds)}, {size(result.fetched[name])} fetched"

    def render(self) -> RenderableType:
        """Return what the terminal shows now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            grid = Table.grid(padding=(0, 2))
            for _column in range(4):
                grid.add_column(no_wrap=True)
            for name, label in _TREE:
                done, total = self._done.get(name, (0, 0))
                bar: RenderableType = (
                    ProgressBar(total=total, completed=done, width=16) if total else Text("")
                )
                amount = size(total) if done >= total else f"{size(done)} of {size(total)}"
                amount = amount if total else ""
                grid.add_row(Text(label, style="bold"), bar, Text(amount), Text(self._state[name]))
            elapsed = duration(time.monotonic() - self._began)
            lines = [Text(line) for line in self._history]
            act = Text(f"{self._act} ... ({elapsed})", style="cyan")
            return Group(*lines, act, grid, Text(_LEGEND, style="dim"))
