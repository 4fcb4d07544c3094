"""CPU seconds that a relay spends to serve a gigabyte, against nginx with sendfile.

Both serve the same shards from the same file system over the same number of connections to the
same reader (`loadtest.rawclient`), pass by pass in turn. Only the servers' CPU is counted, by the
kernel's accounts of their process trees.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import blob_url, survey
from loadtest.measure import median_ratio, tree_cpu_seconds
from loadtest.nginx import serve_files
from loadtest.processes import Process, Processes
from loadtest.scenario import GB, Check, Report, Settings, Size, main, need
from loadtest.topology import Tree

RATIO = 1.2
# A quick run has few samples, and spread from 1.05 to 1.3 with the host's other work, the same
# program measured again and again: it catches what doubles the overhead. A full run holds RATIO.
QUICK_RATIO = 1.35
CONNECTIONS = 8
PASSES = 2  # per sample: 10 ms ticks must be small beside it

_TIMEOUT_S = 120.0


def serve_once(processes: Processes, server: Process, urls: Path) -> float:
    """Read every URL `PASSES` times and return the server's CPU seconds per GB."""
    argv = [sys.executable, "-m", "loadtest.rawclient", str(urls)]
    argv += ["--connections", str(CONNECTIONS), "--passes", str(PASSES)]
    before = tree_cpu_seconds(server.pid)
    client = processes.run(argv, name="rawclient", timeout=_TIMEOUT_S)
    spent = tree_cpu_seconds(server.pid) - before
    return spent * GB / int(client.wait_event("read", timeout=1)["bytes"])


def measure(settings: Settings) -> Report:
    """Compare the relay's CPU per GB served with nginx's."""
    need("nginx")
    checkpoint = settings.fresh("checkpoint")
    write_checkpoint(checkpoint, settings.bytes)
    ours: list[float] = []
    theirs: list[float] = []
    with Tree(settings.fresh("tree")) as tree:
        tree.publish(checkpoint, link=True)
        relay = tree.origin()
        exported = tree.export(settings.fresh("exported"))
        nginx = serve_files(tree.processes, settings.work / "nginx", exported)
        shards = survey(relay.url, tree.run).shards
        lists = {}
        for name, url in (("relay", relay.url), ("nginx", nginx.url)):
            lists[name] = settings.work / f"{name}.urls"
            lists[name].write_text("\n".join(blob_url(url, tree.run, d) for d in shards))
        for warm in (True, *[False] * settings.repeats):
            sample = serve_once(tree.processes, relay.process, lists["relay"])
            other = serve_once(tree.processes, nginx.process, lists["nginx"])
            if not warm:  # the first pass verifies, opens and caches
                ours.append(sample)
                theirs.append(other)
    limit = QUICK_RATIO if settings.quick else RATIO
    return Report(
        checks=[Check("relay_cpu_vs_nginx", median_ratio(ours, theirs), limit, "ratio")],
        samples={"relay_cpu_s_per_gb": ours, "nginx_cpu_s_per_gb": theirs},
        conditions={
            "connections": CONNECTIONS,
            "gb_per_sample": PASSES * settings.bytes / GB,
            "shards": len(shards),
            "statistic": "medians of interleaved passes after one warm-up each",
        },
    )


if __name__ == "__main__":
    main(measure, name="relay_cpu", full=Size(GB, 7), quick=Size(GB, 5))
