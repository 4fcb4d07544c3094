"""A relay under a thousand slow readers and two hundred half-open requests; a worker beside them.

The attackers come from addresses of their own (`attackers.py`, a process). A healthy reader gets every
shard of a version, with the attackers and without, in turns on one relay; its rate with them must be
nearly what it is without. Then the product's own worker pulls beside them. The relay's resident
memory is the kernel's high-water mark.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import blob_url, survey
from loadtest.measure import tree_peak_resident_bytes
from loadtest.rawclient import read_all
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree, last

KEPT_RATE = 0.9
RESIDENT_MB = 250.0
READERS = 1000
HALF_OPEN = 200

_TIMEOUT_S = 120.0
_PASSES = 3


@contextmanager
def attackers(tree: Tree, urls: Path) -> Iterator[int]:
    """Keep the attackers going while the block runs; yield how many readers were served."""
    argv = [sys.executable, "-m", "loadtest.attackers", str(urls)]
    argv += ["--readers", str(READERS), "--half-open", str(HALF_OPEN)]
    process = tree.processes.start(argv, name="attackers")
    try:
        yield int(process.wait_event("attacking", timeout=_TIMEOUT_S)["served"])
    finally:
        process.stop()


def rate(urls: Sequence[str]) -> float:
    """Read all URLs over one connection, several times; return bytes per second."""
    start = time.monotonic()
    total = sum(read_all(urls) for _ in range(_PASSES))
    return total / (time.monotonic() - start)


def measure(settings: Settings) -> Report:
    """Compare a healthy reader's rate with and without attackers, and take the relay's memory."""
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    alone: list[float] = []
    beside: list[float] = []
    served: list[int] = []
    with Tree(settings.fresh("tree")) as tree:
        version = tree.publish(checkpoint, link=True, timeout=_TIMEOUT_S).version
        origin = tree.origin()
        relay = tree.relay("relay", parents=[origin.url])
        pull(tree, settings.work / "first", relay.url, version)
        urls = [blob_url(relay.url, tree.run, d) for d in survey(relay.url, tree.run).shards]
        listed = settings.work / "urls"
        listed.write_text("\n".join(urls))
        rate(urls)
        for _ in range(settings.repeats):
            alone.append(rate(urls))
            with attackers(tree, listed) as count:
                served.append(count)
                beside.append(rate(urls))
                if len(beside) == settings.repeats:
                    pull(tree, settings.work / "second", relay.url, version)
        resident = tree_peak_resident_bytes(relay.process.pid) / MB
    return Report(
        checks=[
            Check("rate_kept_under_attack", statistics.median(beside) / statistics.median(alone),
                  KEPT_RATE, "ratio", at_least=True),
            Check("relay_peak_under_attack", resident, RESIDENT_MB, "MB"),
            Check("slow_readers_served", min(served), READERS, "readers", at_least=True),
        ],
        samples={"alone_bytes_per_s": alone, "beside_bytes_per_s": beside},
        conditions={
            "checkpoint_bytes": total,
            "readers": READERS,
            "half_open": HALF_OPEN,
            "statistic": "median of each side, in turns",
        },
    )  # fmt: skip


def pull(tree: Tree, out: Path, url: str, version: int) -> None:
    """Pull the version with the product's own worker.

    Raises:
        RuntimeError: It got another version.
    """
    pulled = tree.pull(out, sources=[url], timeout=_TIMEOUT_S)
    if last(pulled, "committed")["version"] != version:
        raise RuntimeError(f"pulled another version than {version}")


if __name__ == "__main__":
    main(measure, name="overload", full=Size(GB, 5), quick=Size(GB // 2, 3))
