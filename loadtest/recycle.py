"""What a follower saves by overwriting files of evicted versions, against making new ones.

Two followers, one with `--no-recycle`, take equal versions of two runs from one origin, in turn,
on tmpfs. Counted are the CPU seconds of each process from a publication to `committed`, which is
after the eviction, and the time between the two events.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import measure as bill
from loadtest.checkpoints import write_checkpoint
from loadtest.processes import Event
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import COMMAND_TIMEOUT_S, Tree, Worker, shardcast

CPU_RATIO = 0.9
WALL_RATIO = 1.0

# A spare rests a second before it is used; real versions come minutes apart.
_PAUSE_S = 1.5
_CHECKPOINTS = 3
# The first version finds nothing to evict, the second one no spare.
_WARM_UP = 2
_TIMEOUT_S = 60.0


@dataclass
class Side:
    """One of the two followers and what its versions cost."""

    run: str
    worker: Worker
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    recycled: int = 0
    inodes: set[int] = field(default_factory=set)

    def take(self, tree: Tree, checkpoint: Path, version: int) -> None:
        """Publish a version and wait until it is current here."""
        before = bill.cpu_seconds(self.worker.process.pid)
        published = publish(tree, self.run, checkpoint)
        committed = self.worker.wait_committed(version, timeout=_TIMEOUT_S)
        if version > _WARM_UP:
            self.cpu_s.append(bill.cpu_seconds(self.worker.process.pid) - before)
            self.wall_s.append((committed["t"] - published["t"]) / 1000)
        files = Path(committed["path"]).glob("*.safetensors")
        inodes = {os.stat(path).st_ino for path in files}
        self.recycled += inodes <= self.inodes
        self.inodes |= inodes


def publish(tree: Tree, run: str, checkpoint: Path) -> Event:
    """Publish a checkpoint as the next version of a run; return the `published` event."""
    argv = shardcast(
        "publish", checkpoint, "--run", run, "--store", tree.store,
        "--key", tree.keys / "shardcast.key", "--link", "--no-stream", "--json",
    )  # fmt: skip
    process = tree.processes.run(argv, name=f"publish-{run}", timeout=COMMAND_TIMEOUT_S)
    return process.wait_event("published", timeout=COMMAND_TIMEOUT_S)


def follow(tree: Tree, run: str, url: str, *options: str) -> Side:
    """Start a follower of a run that keeps one version."""
    out = tree.root / f"out-{run}"
    argv = shardcast(
        "follow", run, "--from", url, "--out", out, "--durability", "none", "--keep", "1",
        *tree.trust, "--json", *options,
    )  # fmt: skip
    return Side(run, Worker(tree.processes.start(argv, name=run), out))


def measure(settings: Settings) -> Report:
    """Compare CPU and time per version of a follower that recycles with one that does not."""
    checkpoints = []
    total = 0
    for seed in range(_CHECKPOINTS):
        checkpoints.append(settings.fresh(f"checkpoint-{seed}"))
        total = write_checkpoint(checkpoints[-1], settings.bytes, seed=seed)
    with Tree(settings.fresh("tree")) as tree:
        for run in ("recycled", "fresh"):
            publish(tree, run, checkpoints[0])
        origin = tree.origin()
        recycled = follow(tree, "recycled", origin.url)
        fresh = follow(tree, "fresh", origin.url, "--no-recycle")
        for side in (recycled, fresh):
            side.worker.wait_committed(1, timeout=_TIMEOUT_S)
        for version in range(2, _WARM_UP + settings.repeats + 1):
            for side in (recycled, fresh):
                time.sleep(_PAUSE_S / 2)
                side.take(tree, checkpoints[version % _CHECKPOINTS], version)
    return Report(
        checks=[
            Check(
                "recycled_cpu_vs_fresh", min(recycled.cpu_s) / min(fresh.cpu_s), CPU_RATIO, "ratio"
            ),
            Check(
                "recycled_wall_vs_fresh",
                statistics.median(recycled.wall_s) / statistics.median(fresh.wall_s),
                WALL_RATIO,
                "ratio",
            ),
            Check("versions_recycled", recycled.recycled, 1, "versions", at_least=True),
            Check("versions_recycled_without", fresh.recycled, 0, "versions"),
        ],
        samples={
            "recycled_cpu_s_per_gb": [cpu * GB / total for cpu in recycled.cpu_s],
            "fresh_cpu_s_per_gb": [cpu * GB / total for cpu in fresh.cpu_s],
            "recycled_wall_s": recycled.wall_s,
            "fresh_wall_s": fresh.wall_s,
        },
        conditions={
            "version_bytes": total,
            "durability": "none",
            "keep": 1,
            "changed": "every shard of every version",
            "statistic": "minima of CPU, medians of time, versions in turn",
        },
    )


if __name__ == "__main__":
    main(measure, name="recycle", full=Size(1000 * MB, 8), quick=Size(500 * MB, 4))
