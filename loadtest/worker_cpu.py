"""CPU seconds that a worker spends on a gigabyte, against curl and BLAKE3 doing the same.

`shardcast pull` fetches, hashes and writes to tmpfs. The floor is two processes: curl fetching
the same blobs from the same server into files on the same file system, and a process that hashes
them with BLAKE3 (the cheapest way of reading). Whole processes count, start included.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import blob_url, survey
from loadtest.processes import Processes
from loadtest.scenario import GB, Check, Report, Settings, Size, main, need
from loadtest.topology import Tree

RATIO = 1.2

_TIMEOUT_S = 120.0


def curl_and_hash(processes: Processes, urls: Sequence[str], out: Path) -> tuple[float, float]:
    """Fetch the URLs with one curl into `out`, hash the files; return both CPU seconds."""
    out.mkdir()
    config = out.with_suffix(".curl")
    lines = [f'url = "{url}"\noutput = "{out / str(n)}"' for n, url in enumerate(urls)]
    config.write_text("\n".join(lines))
    curl = processes.run(
        ["curl", "--silent", "--show-error", "--fail", "--config", config],
        name="curl", timeout=_TIMEOUT_S,
    )  # fmt: skip
    argv = [sys.executable, "-m", "loadtest.hashing", str(out), "--way", "read-files"]
    hashing = processes.run(argv, name="blake3", timeout=_TIMEOUT_S)
    shutil.rmtree(out)
    return curl.usage.cpu_s, hashing.usage.cpu_s


def measure(settings: Settings) -> Report:
    """Compare the CPU of `shardcast pull` with curl to a file plus BLAKE3."""
    need("curl")
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    pulls, floors, curls, hashes, walls = [], [], [], [], []
    with Tree(settings.fresh("tree")) as tree:
        tree.publish(checkpoint, link=True)
        origin = tree.origin()
        urls = [blob_url(origin.url, tree.run, d) for d in survey(origin.url, tree.run).shards]
        for warm in (True, *[False] * settings.repeats):
            out = settings.work / "pulled"
            usage = tree.pull(out, sources=[origin.url]).usage
            shutil.rmtree(out)
            curl, hashing = curl_and_hash(tree.processes, urls, settings.work / "curled")
            if warm:  # the first round verifies the store and warms the page allocator
                continue
            pulls.append(usage.cpu_s * GB / total)
            walls.append(usage.wall_s)
            curls.append(curl * GB / total)
            hashes.append(hashing * GB / total)
            floors.append(curls[-1] + hashes[-1])
    return Report(
        checks=[Check("pull_cpu_vs_curl_and_blake3", min(pulls) / min(floors), RATIO, "ratio")],
        samples={
            "pull_cpu_s_per_gb": pulls,
            "pull_wall_s": walls,
            "curl_cpu_s_per_gb": curls,
            "blake3_cpu_s_per_gb": hashes,
        },
        conditions={
            "checkpoint_bytes": total,
            "durability": "none",
            "curl": "one process, one kept-alive connection, blobs one after another",
            "statistic": "minima of interleaved runs after one warm-up each: first touch of pages adds, "
            "and by chance",
        },
    )


if __name__ == "__main__":
    main(measure, name="worker_cpu", full=Size(GB, 7), quick=Size(GB, 5))
