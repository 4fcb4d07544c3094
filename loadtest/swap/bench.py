"""One model on one machine: origin, relay, a worker's directory, a server, clients."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest.processes import Process
from loadtest.swap.clients import Clients
from loadtest.swap.engine import KEY, EngineServer
from loadtest.swap.models import SHAPES
from loadtest.topology import Relay, Tree, Worker

VERSIONS: Final = ("v1", "v2", "v2-step", "v4", "v5")
"""The first two for pauses, then one that follows the second by a step of training, then two others."""
TIMEOUT_S: Final = 300.0


@dataclass
class Bench:
    """What all measurements of one model share.

    Attributes:
        size: Its name in ``SHAPES``.
        checkpoints: Where ``VERSIONS`` lie.
        bytes: Of its tensors.
        targets: Versions 1 and 2, as the routes take them.
    """

    size: str
    tree: Tree
    origin: Relay
    relay: Relay
    server: EngineServer
    copier: Process
    checkpoints: Path
    parameters: int
    bytes: int
    targets: list[dict[str, Any]]
    copies: int = 0

    def clients(self) -> Clients:
        """Return clients; they stream while they are entered."""
        return Clients(self.server.port, KEY, int(SHAPES[self.size]["vocab_size"]))

    def copy(self) -> dict[str, float]:
        """Copy the weights' bytes once in memory, now; nobody streams meanwhile."""
        number, self.copies = self.copies, self.copies + 1
        self.copier.say("")
        event = self.copier.wait_event(
            "copied", timeout=TIMEOUT_S, where=lambda event: event["number"] == number
        )
        return {name: float(event[name]) for name in ("one_ms", "all_ms")}

    def follow(self, *options: str) -> Worker:
        """Start the worker (with options: the agent)."""
        return self.tree.follow("worker", "--keep", "2", *options, sources=[self.relay.url])


@contextlib.contextmanager
def bench(work: Path, size: str, variables: Mapping[str, str]) -> Iterator[Bench]:
    """Lay it all out, the engine serving version 1, version 2 beside it on the disk."""
    with Tree(work / "tree") as tree:
        checkpoints = work / "checkpoints"
        models = tree.processes.run(
            [sys.executable, "-m", "loadtest.swap.models", size, checkpoints, *VERSIONS],
            name="models", timeout=TIMEOUT_S,
        )  # fmt: skip
        saved = models.wait_event("saved", timeout=1)
        origin = tree.origin()
        relay = tree.relay("relay", parents=[origin.url])
        server = EngineServer(tree.processes, work, variables)
        made = Bench(
            size, tree, origin, relay, server, models, checkpoints,
            int(saved["parameters"]), int(saved["bytes"]), [],
        )  # fmt: skip
        worker = made.follow()
        for name in VERSIONS[:2]:
            version = tree.publish(checkpoints / name, "--no-delta").version
            event = worker.wait_committed(version, timeout=TIMEOUT_S)
            fields = {"run": "run", "version": "version", "digest": "manifest", "path": "path"}
            made.targets.append({name: event[key] for name, key in fields.items()})
        worker.process.stop()
        made.copier = tree.processes.start(
            [sys.executable, "-m", "loadtest.swap.copying", str(made.bytes)],
            name="copying", stdin=True,
        )  # fmt: skip
        made.copier.wait_event("warm", timeout=TIMEOUT_S)
        server.begin(made.targets[0]["path"])
        server.wait_started()
        yield made


def wall_of(monotonic: float) -> float:
    """Return Unix milliseconds of a moment on the monotonic clock."""
    return time.time() * 1000 - (time.monotonic() - monotonic) * 1000
