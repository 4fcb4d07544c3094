"""The demonstration itself: publish versions into a tree and prove that every worker got them.

The first version travels whole, every later one as what changed since the one before.

::

    origin --+-- relay-1 --+-- worker-1   (from relay-1 and relay-2)
             |             |
             +-- relay-2 --+-- relay-3 --+-- worker-2
                                         +-- worker-3

relay-1 and relay-2 are siblings: together they fetch every byte from the origin once. The relays
rebuild whole versions from deltas, so that none is fetched whole after the first.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from shardcast.demo import checkpoint, training
from shardcast.demo.equality import compare
from shardcast.demo.processes import DemoError, Event, Node, Processes, free_ports
from shardcast.store.files import require_space

RUN: Final = "demo"
RELAYS: Final = ("relay-1", "relay-2", "relay-3")
WORKERS: Final = ("worker-1", "worker-2", "worker-3")
KEEP: Final = 2
START_TIMEOUT_S: Final = 30.0
SLOWEST_BYTES_PER_S: Final = 5e6
"""A machine on which the tree moves less than this is taken to be stuck."""

SENT_METRIC: Final = "shardcast_sent_bytes_total"


@dataclass
class VersionResult:
    """What was measured of one version. Times in seconds, sizes in bytes.

    Attributes:
        version: Its number.
        bytes: Its size.
        changed: Share of weights that differ from the version before; None for the first.
        publish_s: From the start of the command to the announced head.
        announced_ms: When it was announced, Unix milliseconds.
        delta_bytes: What somebody fetches who holds the version before, as the head says; None where
            no delta was announced.
        ready_s: Worker -> from the announcement until it held every verified shard.
        fetched: Worker -> bytes that it took over the network.
        by_delta: Worker -> how many of these were delta blobs.
        sent: Relay or origin -> bytes of blobs that it sent since the version before was whole
            everywhere.
        equal: Worker -> whether its directory equals the source; filled after comparing.
        files: How many files were compared a worker.
    """

    version: int
    bytes: int
    changed: float | None
    publish_s: float
    announced_ms: int
    delta_bytes: int | None = None
    ready_s: dict[str, float] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    by_delta: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)
    files: int = 0

    @property
    def wire_bytes(self) -> int:
        """What the worker that took most of all fetched, everything counted."""
        return max(self.fetched.values(), default=0)

    @property
    def ratio(self) -> float | None:
        """How many times a whole copy that is; None before anybody has it."""
        return self.bytes / self.wire_bytes if self.wire_bytes else None


class Audience(Protocol):
    """Watches the demonstration."""

    def doing(self, what: str) -> None:
        """A new act begins."""
        ...

    def joined(self, name: str, url: str | None) -> None:
        """A process of the tree is up."""
        ...

    def published(self, result: VersionResult) -> None:
        """A version was announced."""
        ...

    def progress(self, name: str, version: int, done: int, total: int) -> None:
        """A worker has ``done`` of ``total`` bytes of a version."""
        ...

    def ready(self, name: str, result: VersionResult) -> None:
        """A worker holds a version."""
        ...

    def compared(self, result: VersionResult) -> None:
        """Every worker's directory was compared with the source."""
        ...


@dataclass(frozen=True)
class Plan:
    """What to show.

    Attributes:
        root: Everything is written below it.
        source: A checkpoint to publish, or None: one is made.
        size_bytes: How large a made one is.
        updates: How many versions follow the first.
    """

    root: Path
    source: Path | None
    size_bytes: int
    updates: int


class Scenario:
    """Runs a plan; a context manager that ends every process it started."""

    def __init__(self, plan: Plan, audience: Audience) -> None:
        """Start nothing yet."""
        self._plan = plan
        self._audience = audience
        self.results: list[VersionResult] = []
        self.urls: dict[str, str] = {}
        self._processes = Processes(plan.root, self._on_event)
        self._counted: dict[str, int] = {}
        self._timeout_s = 60.0

    def run(self) -> list[VersionResult]:
        """Run everything; return what was measured.

        Raises:
            DemoError: If a process fails or something takes far too long.
            DiskFullError: If there is no room for it.
        """
        with self._processes:
            source = self._source()
            total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
            versions = self._plan.updates + 1
            nodes = 1 + len(RELAYS) + len(WORKERS)
            require_space(
                self._plan.root, total * (nodes * min(KEEP + 1, versions) + versions), what="demo"
            )
            self._timeout_s = 60.0 + total * nodes / SLOWEST_BYTES_PER_S
            self._start_tree()
            self._publish(source, None)
            for update in range(1, versions):
                self._audience.doing(f"optimiser step {update}")
                directory = self._plan.root / f"step-{update}"
                stepped = training.write_step(source, directory, update)
                self._publish(directory, stepped.changed / max(stepped.elements, 1))
        return self.results

    def _source(self) -> Path:
        if self._plan.source is not None:
            return self._plan.source
        directory = self._plan.root / "step-0"
        self._audience.doing("making a checkpoint")
        checkpoint.write_checkpoint(directory, self._plan.size_bytes)
        return directory

    # --- the tree ---------------------------------------------------------------------------

    def _start_tree(self) -> None:
        root = self._plan.root
        self._audience.doing("starting the tree")
        self._processes.run("keygen", ["keygen", "--out", root / "keys"], START_TIMEOUT_S)
        origin = self._relay("origin", [], port=0)
        first, second = free_ports(2)
        pair = [f"http://127.0.0.1:{port}" for port in (first, second)]
        for name, port, sibling in (("relay-1", first, pair[1]), ("relay-2", second, pair[0])):
            self._relay(name, [origin], port=port, siblings=[sibling])
        third = self._relay("relay-3", pair, port=0)
        self._worker("worker-1", pair)
        self._worker("worker-2", [third])
        self._worker("worker-3", [third])

    @property
    def _trust(self) -> list[str | Path]:
        return ["--pubkey", self._plan.root / "keys" / "shardcast.pub"]

    def _relay(
        self, name: str, parents: Sequence[str], *, port: int, siblings: Sequence[str] = ()
    ) -> str:
        arguments: list[str | Path] = ["relay", "--store", self._plan.root / name]
        arguments += ["--listen", f"127.0.0.1:{port}"]
        for parent in parents:
            arguments += ["--parent", parent]
        for sibling in siblings:
            arguments += ["--sibling", sibling]
        if parents:
            arguments.append("--materialize")
        node = self._processes.start(name, [*arguments, *self._trust])
        event = self._processes.wait_event(node, "listening", START_TIMEOUT_S)
        self.urls[name] = str(event["url"]).rstrip("/")
        self._audience.joined(name, self.urls[name])
        return self.urls[name]

    def _worker(self, name: str, sources: Sequence[str]) -> None:
        arguments: list[str | Path] = ["follow", RUN, "--out", self._plan.root / name]
        for source in sources:
            arguments += ["--from", source]
        arguments += ["--keep", str(KEEP), "--durability", "none", "--json"]
        self._processes.start(name, [*arguments, *self._trust])
        self._audience.joined(name, None)

    # --- versions ---------------------------------------------------------------------------

    def _publish(self, directory: Path, changed: float | None) -> None:
        number = len(self.results) + 1
        self._audience.doing(f"publishing version {number}")
        node = self._processes.run(
            f"publish-{number}",
            [
                *("publish", directory, "--run", RUN, "--store", self._plan.root / "origin"),
                *("--key", self._plan.root / "keys" / "shardcast.key", "--step", str(number - 1)),
                *("--keep", str(KEEP), "--durability", "none", "--json"),
            ],
            self._timeout_s,
        )
        event = node.find("published")
        if event is None:
            raise DemoError(f"{node.name} ended without announcing a version")
        result = VersionResult(
            version=int(event["version"]),
            bytes=int(event["bytes"]),
            changed=changed,
            publish_s=float(event["seconds"]),
            announced_ms=int(event["t"]),
            delta_bytes=_promised(event),
        )
        self.results.append(result)
        self._audience.published(result)
        self._replay(result.version)
        self._audience.doing(f"distributing version {result.version}")
        self._processes.wait(
            lambda: len(result.ready_s) == len(WORKERS) and self._committed(result.version),
            self._timeout_s,
            f"all workers to hold version {result.version}",
        )
        before, self._counted = self._counted, self._sent()
        result.sent = {name: sent - before.get(name, 0) for name, sent in self._counted.items()}
        self._audience.doing(f"comparing version {result.version} byte for byte")
        outs = {name: self._plan.root / name / "current" for name in WORKERS}
        result.files, result.equal = compare(directory, outs)
        self._audience.compared(result)

    def _on_event(self, node: Node, event: Event) -> None:
        if node.name not in WORKERS:
            return
        version = event.get("version")
        if event["event"] == "progress" and isinstance(version, int):
            done, total = event.get("bytes"), event.get("bytes_total")
            if isinstance(done, int) and isinstance(total, int):
                self._audience.progress(node.name, version, done, total)
        if event["event"] == "ready" and self.results and version == self.results[-1].version:
            self._ready(node.name, event)

    def _replay(self, version: int) -> None:
        """Count workers that were ready before the publisher's process had ended."""
        for node in self._processes.nodes:
            for event in node.events if node.name in WORKERS else ():
                if event["event"] == "ready" and event.get("version") == version:
                    self._ready(node.name, event)

    def _ready(self, name: str, event: Event) -> None:
        result = self.results[-1]
        result.ready_s[name] = max(0, int(event["t"]) - result.announced_ms) / 1000
        result.fetched[name] = int(event.get("bytes_fetched") or 0)
        result.by_delta[name] = int(event.get("bytes_delta") or 0)
        self._audience.ready(name, result)

    def _committed(self, version: int) -> bool:
        return all(
            any(e["event"] == "committed" and e.get("version") == version for e in node.events)
            for node in self._processes.nodes
            if node.name in WORKERS
        )

    def _sent(self) -> dict[str, int]:
        return {name: sent_bytes(url) for name, url in self.urls.items()}


def _promised(published: Event) -> int | None:
    """Return the price of the delta that a publication announced."""
    needed = [int(delta["bytes_needed"]) for delta in published.get("deltas") or ()]
    return min(needed, default=None)


def sent_bytes(url: str, get: Callable[[str], str] | None = None) -> int:
    """Return the bytes of blobs that a relay has sent since it started (its metrics tell)."""
    text = (get or _get)(f"{url}/metrics")
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((SENT_METRIC + "{", SENT_METRIC + " "))
    ]
    return round(sum(values))


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own relay
            return str(answer.read().decode("utf-8"))
    except (urllib.error.URLError, OSError) as error:
        raise DemoError(f"no metrics from {url}: {error}", source=url) from error
