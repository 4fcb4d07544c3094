"""A tree of real Shardcast processes: origin, relays, workers, on free loopback ports.

Black box: only the command line and the JSON events of docs/PROTOCOL.md are used, so a tree can
be started from any installed version.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from loadtest.processes import Event, Process, Processes, free_port

START_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 120.0

_XDG = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")


def shardcast(*arguments: str | Path) -> list[str]:
    """Return the argv that runs the product with this very interpreter."""
    return [sys.executable, "-m", "shardcast.cli.main", *(str(part) for part in arguments)]


class Place(Protocol):
    """A machine that a process may run on, instead of this one (`machines.Machine`)."""

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    def argv(self, *argv: str | Path) -> list[str]:
        """The command line that runs a program there."""
        ...


@dataclass
class Relay:
    """A running relay (or origin)."""

    process: Process
    store: Path
    url: str


@dataclass
class Worker:
    """A running `shardcast follow`."""

    process: Process
    out: Path

    def wait_ready(self, version: int, *, timeout: float) -> Event:
        """Wait until this worker holds `version`, every shard verified."""
        return self._wait("ready", version, timeout)

    def wait_committed(self, version: int, *, timeout: float) -> Event:
        """Wait until `OUT/current` names `version`."""
        return self._wait("committed", version, timeout)

    def _wait(self, kind: str, version: int, timeout: float) -> Event:
        return self.process.wait_event(
            kind, timeout=timeout, where=lambda event: event.get("version") == version
        )

    @property
    def current(self) -> Path:
        """The directory of the version that it committed last."""
        return (self.out / "current").resolve(strict=True)


@dataclass(frozen=True)
class Published:
    """A finished `shardcast publish`."""

    process: Process
    event: Event

    @property
    def version(self) -> int:
        """The number it published under."""
        return int(self.event["version"])


class Tree:
    """Starts and ends the processes of one tree; a context manager.

    Attributes:
        root: Everything the tree writes lies below it.
        run: The run that is published, relayed and pulled.
        processes: The group that ends what was started.
        urls: Base URL of each relay by name.
    """

    def __init__(self, root: Path, *, run: str = "policy", durability: str = "none") -> None:
        """Lay the tree out below `root`; workers use `durability`."""
        self.root = root
        self.run = run
        self.urls: dict[str, str] = {}
        self._durability = durability
        self._cleanup = contextlib.ExitStack()
        env = dict(os.environ) | {name: str(root / "xdg" / name) for name in _XDG}
        self.processes = Processes(root / "logs", env=env)
        self.keys = root / "keys"

    def __enter__(self) -> Self:
        """Make the publisher's key pair."""
        self._cleanup.enter_context(self.processes)
        try:
            self.processes.run(
                shardcast("keygen", "--out", self.keys), name="keygen", timeout=COMMAND_TIMEOUT_S
            )
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process of the tree."""
        self._cleanup.close()

    @property
    def trust(self) -> list[str]:
        """The options that pin the publisher's key."""
        return ["--pubkey", str(self.keys / "shardcast.pub")]

    @property
    def store(self) -> Path:
        """The origin's store, which `publish` writes into."""
        return self.root / "origin"

    def publish(
        self,
        checkpoint: Path,
        *options: str,
        link: bool = False,
        timeout: float = COMMAND_TIMEOUT_S,
    ) -> Published:
        """Publish a directory into the origin's store and wait for the `published` event."""
        argv = shardcast(
            "publish", checkpoint, "--run", self.run, "--store", self.store,
            "--key", self.keys / "shardcast.key", "--json",
            *(["--link"] if link else []), *options,
        )  # fmt: skip
        process = self.processes.run(argv, name="publish", timeout=timeout)
        return Published(process, process.wait_event("published", timeout=timeout))

    def origin(self, *options: str, name: str = "origin", on: Place | None = None) -> Relay:
        """Start the origin: a relay without parents on the origin's store."""
        return self._relay(name, self.store, free_port(), options, on)

    def relay(
        self,
        name: str,
        *options: str,
        parents: Sequence[str],
        siblings: Sequence[str] = (),
        port: int = 0,
        on: Place | None = None,
    ) -> Relay:
        """Start a relay below `parents` (URLs), on a store of its own.

        A second call with the same name restarts it on the store it had.
        """
        links = [part for url in parents for part in ("--parent", url)]
        links += [part for url in siblings for part in ("--sibling", url)]
        argv = [*links, "--run", self.run, *self.trust, *options]
        return self._relay(name, self.root / name, port, argv, on)

    def siblings(self, names: Sequence[str], *, parents: Sequence[str]) -> list[Relay]:
        """Start relays that are each other's siblings, on ports chosen beforehand."""
        ports = {name: free_port() for name in names}
        return [
            self.relay(
                name,
                parents=parents,
                siblings=[f"http://127.0.0.1:{ports[n]}" for n in names if n != name],
                port=ports[name],
            )
            for name in names
        ]

    def _relay(
        self, name: str, store: Path, port: int, options: Sequence[str], on: Place | None
    ) -> Relay:
        listen = f"{'127.0.0.1' if on is None else on.address}:{port}"
        argv = shardcast("relay", "--store", store, "--listen", listen, *options)
        process = self.processes.start(argv if on is None else on.argv(*argv), name=name)
        url = str(process.wait_event("listening", timeout=START_TIMEOUT_S)["url"]).rstrip("/")
        self.urls[name] = url
        return Relay(process, store, url)

    def follow(
        self,
        name: str,
        *options: str,
        sources: Sequence[str],
        on: Place | None = None,
        out: Path | None = None,
    ) -> Worker:
        """Start a worker that follows the run from `sources` (URLs), into `out` if given."""
        out = out or self.root / name
        argv = self._reader("follow", out, sources, options)
        process = self.processes.start(argv if on is None else on.argv(*argv), name=name)
        return Worker(process, out)

    def pull(
        self,
        out: Path,
        *options: str,
        sources: Sequence[str],
        name: str = "pull",
        timeout: float = COMMAND_TIMEOUT_S,
    ) -> Process:
        """Run `shardcast pull` to its successful end."""
        argv = self._reader("pull", out, sources, options)
        return self.processes.run(argv, name=name, timeout=timeout)

    def start_pull(self, name: str, out: Path, *options: str, sources: Sequence[str]) -> Process:
        """Start `shardcast pull` without waiting for its end."""
        return self.processes.start(self._reader("pull", out, sources, options), name=name)

    def export(self, out: Path) -> Path:
        """Write the run as plain files (`out/v1/...`) and return `out`."""
        argv = shardcast("export", self.run, "--store", self.store, "--out", out)
        self.processes.run(argv, name="export", timeout=COMMAND_TIMEOUT_S)
        return out

    def _reader(
        self, command: str, out: Path, sources: Sequence[str], options: Sequence[str]
    ) -> list[str]:
        links = [part for url in sources for part in ("--from", url)]
        return shardcast(
            command, self.run, *links, "--out", out, "--durability", self._durability,
            *self.trust, "--json", *options,
        )  # fmt: skip


def last(process: Process, kind: str) -> Event:
    """Return the newest event of a kind from an ended process.

    Raises:
        LookupError: It said nothing of the kind.
    """
    events = process.events(kind)
    if not events:
        raise LookupError(process.describe(f"ended without an event {kind!r}"))
    return events[-1]


def wait_all(workers: Sequence[Worker], version: int, *, timeout: float) -> list[Event]:
    """Wait until every worker is ready with `version`; return the events in worker order."""
    return [worker.wait_ready(version, timeout=timeout) for worker in workers]
