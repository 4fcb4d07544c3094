"""Resident memory of relay and worker while gigabytes pass through, and under slow readers.

origin -> relay -> worker. The figures are the kernel's high-water marks (`VmHWM`) of the process
trees, so no peak is missed. Then 500 readers ask the relay for shards and read 4 KiB/s each.
"""

from __future__ import annotations

import os

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import blob_url, survey
from loadtest.measure import tree_peak_resident_bytes
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.slow_readers import hold
from loadtest.topology import Tree

PASSING_MB = 250.0
SLOW_READERS_MB = 400.0
READERS = 500

_TIMEOUT_S = 300.0
_START_S = 30.0


def measure(settings: Settings) -> Report:
    """Take the peak resident memory of relay and worker."""
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    with Tree(settings.fresh("tree")) as tree:
        # Linked, so that only the relay's and the worker's copies take room.
        version = tree.publish(checkpoint, link=True, timeout=_TIMEOUT_S).version
        origin = tree.origin()
        relay = tree.relay("relay", parents=[origin.url])
        worker = tree.follow("worker", sources=[relay.url])
        worker.wait_committed(version, timeout=_TIMEOUT_S)
        passing = tree_peak_resident_bytes(relay.process.pid) / MB
        working = tree_peak_resident_bytes(worker.process.pid) / MB
        serving = tree_peak_resident_bytes(origin.process.pid) / MB
        urls = [blob_url(relay.url, tree.run, d) for d in survey(relay.url, tree.run).shards]
        outcome = hold(urls, count=READERS, start_s=_START_S, hold_s=5 if settings.quick else 15)
        slow = tree_peak_resident_bytes(relay.process.pid) / MB
    return Report(
        checks=[
            Check("relay_peak", passing, PASSING_MB, "MB"),
            Check("worker_peak", working, PASSING_MB, "MB"),
            Check("relay_peak_slow_readers", slow, SLOW_READERS_MB, "MB"),
            Check("slow_readers_served", outcome.served, READERS, "readers", at_least=True),
        ],
        samples={"origin_peak_mb": [serving], "readers_still_held": [outcome.held]},
        conditions={
            "checkpoint_bytes": total,
            "shards": len(urls),
            "readers": READERS,
            "open_files_limit": os.sysconf("SC_OPEN_MAX"),
        },
    )


if __name__ == "__main__":
    main(measure, name="memory", full=Size(4 * GB, 1), quick=Size(GB, 1))
