"""What streaming saves: publish started to *ready* at the end of three hops, streamed against not.

A trainer writes a version while it gathers weights, so hashing takes a while (`streaming.py`); every hop is
a relay with a bounded uplink (`--limit-rate`). Both sides run in turns. Without streaming the times that
publishing and moving the bytes take add up (the relays cut through, so the hops do not); with it the larger
one of them remains, and a step.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path

from loadtest.checkpoints import write_checkpoint
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree

# Equal on both sides, so that a perfect overlap would halve the time.
SECONDS = {True: 3.0, False: 10.0}
# 2 is what overlapping two equal halves can give; the last step, and the commands' start, cost the rest.
TIMES_FASTER = 1.3

_WARM_BYTES = 4 * MB
_TIMEOUT_S = 240.0


def once(root: Path, checkpoint: Path, seconds: float, *, stream: bool) -> tuple[float, float]:
    """Return the seconds from publish to *ready* at the worker, and the share fetched before the end."""
    first = root / "first"
    write_checkpoint(first, _WARM_BYTES, seed=9)
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    uplink = ["--limit-rate", str(int(size / seconds))]
    with Tree(root) as tree:
        url = tree.origin(*uplink).url
        for name in ("relay1", "relay2"):
            url = tree.relay(name, *uplink, parents=[url]).url
        worker = tree.follow("worker", sources=[url])
        worker.wait_ready(tree.publish(first).version, timeout=_TIMEOUT_S)
        argv = [
            sys.executable, "-m", "loadtest.streaming", str(checkpoint), "--run", tree.run,
            "--store", str(tree.store), "--key", str(tree.keys / "shardcast.key"),
            "--seconds", str(seconds), *([] if stream else ["--no-stream"]),
        ]  # fmt: skip
        process = tree.processes.run(argv, name="slowly", timeout=_TIMEOUT_S)
        version = int(process.wait_event("published", timeout=_TIMEOUT_S)["version"])
        ready = worker.wait_ready(version, timeout=_TIMEOUT_S)
        took = (ready["t"] - process.started_unix_ms) / 1000
        return took, ready["bytes_ahead"] / size


def measure(settings: Settings) -> Report:
    """Compare a publication that streams with one that does not, over three hops."""
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    seconds = SECONDS[settings.quick]
    streamed, still, ahead = [], [], []
    for _ in range(settings.repeats):
        took, share = once(settings.fresh("tree"), checkpoint, seconds, stream=True)
        streamed.append(took)
        ahead.append(share)
        still.append(once(settings.fresh("tree"), checkpoint, seconds, stream=False)[0])
    shutil.rmtree(settings.work / "tree")
    return Report(
        checks=[
            Check(
                "times_faster_than_without", statistics.median(still) / statistics.median(streamed),
                TIMES_FASTER, "ratio", at_least=True,
            ),
        ],
        samples={"streamed_s": streamed, "not_streamed_s": still, "share_before_the_end": ahead},
        conditions={
            "checkpoint_bytes": total,
            "hops": "origin, relay, relay, worker",
            "publisher_s": seconds,
            "uplink_bytes_per_s": int(total / seconds),
            "durability": "none",
            "statistic": "median / median",
        },
    )  # fmt: skip


if __name__ == "__main__":
    main(measure, name="stream", full=Size(GB, 3), quick=Size(100 * MB, 1))
