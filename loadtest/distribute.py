"""Publish to the last worker's *ready*: one version, two sibling relays, four workers.

Ours: `shardcast publish` is started; the clock stops at the `t` of the last `ready` event, when
a worker has every shard verified. The peer: SHARDCAST 0.3.2 with relays that poll every second
(its default is 30), on one file of the same size; the clock runs from `broadcast` to the last
client's verified copy. Process start is inside our time and outside the peer's. Quick mode takes
the peer's times from baselines.json, because they need minutes and scatter.
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

from loadtest import peer
from loadtest.checkpoints import write_checkpoint
from loadtest.measure import tree_cpu_seconds
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree, wait_all

RELAYS = 2
WORKERS = 4
PEER_POLL_S = 1.0
# 6 is about what two cores allow by the CPU floors of each stage; 5 leaves room for noise.
TIMES_FASTER = 5.0
# The peer's time has two humps, by whether its clients ask a relay for a shard that is not there
# yet and then sit out retry intervals of 2 and 15 s. So it runs often enough for a mean, and
# its lucky runs have a limit of their own.
PEER_RUNS = 5
TIMES_FASTER_THAN_BEST = 1.5

BASELINES = Path(__file__).resolve().parent / "baselines.json"

_WARM_BYTES = 4 * MB
_TIMEOUT_S = 120.0


def ours(root: Path, checkpoint: Path) -> tuple[float, float]:
    """Return the seconds from publish to the last *ready*, and the CPU seconds they took."""
    first = root / "first"
    write_checkpoint(first, _WARM_BYTES, seed=9)
    with Tree(root) as tree:
        origin = tree.origin()
        relays = tree.siblings([f"relay{n}" for n in range(RELAYS)], parents=[origin.url])
        sources = [relay.url for relay in relays]
        workers = [tree.follow(f"worker{n}", sources=sources) for n in range(WORKERS)]
        # A small first version proves that everyone is connected before the clock starts.
        wait_all(workers, tree.publish(first).version, timeout=_TIMEOUT_S)
        servers = [p.pid for p in (origin.process, *(r.process for r in relays))]
        servers += [worker.process.pid for worker in workers]
        before = sum(tree_cpu_seconds(pid) for pid in servers)
        published = tree.publish(checkpoint)
        events = wait_all(workers, published.version, timeout=_TIMEOUT_S)
        cpu = sum(tree_cpu_seconds(pid) for pid in servers) - before
        seconds = (max(event["t"] for event in events) - published.process.started_unix_ms) / 1000
        return seconds, cpu + published.process.usage.cpu_s


def theirs(root: Path, size: int) -> float:
    """Return the peer's seconds for one file of about `size` bytes."""
    source = root / "source"
    write_checkpoint(source, size, weight_files=1)
    (file,) = source.glob("*.safetensors")
    return peer.distribute(root, file, relays=RELAYS, clients=WORKERS, poll_s=PEER_POLL_S)


def recorded() -> list[float]:
    """Return the peer's times for 1 GB that are kept in git, with their environment."""
    floors = json.loads(BASELINES.read_text(encoding="utf-8"))["floors"]
    return [float(seconds) for seconds in floors["peer_1gb_s"]["samples"]]


def peer_times(settings: Settings) -> list[float]:
    """Run the peer, or recall it in quick mode, where only the recorded size compares."""
    if settings.quick and settings.bytes == GB:
        return recorded()
    times = []
    for _ in range(PEER_RUNS):
        times.append(theirs(settings.fresh("peer"), settings.bytes))
        shutil.rmtree(settings.work / "peer")
    return times


def measure(settings: Settings) -> Report:
    """Compare us with SHARDCAST 0.3.2: publish to ready of the last of four workers."""
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    seconds, cpu = [], []
    for _ in range(settings.repeats):
        took, cost = ours(settings.fresh("ours"), checkpoint)
        seconds.append(took)
        cpu.append(cost)
    shutil.rmtree(settings.work / "ours")
    peers = peer_times(settings)
    # The first runs of a fresh machine pay for memory that nobody has touched; with only three of
    # them the best one tells more than the median.
    typical = min(seconds) if settings.quick else statistics.median(seconds)
    return Report(
        checks=[
            Check(
                "times_faster_than_peer", statistics.mean(peers) / typical, TIMES_FASTER, "ratio",
                at_least=True,
            ),
            Check(
                "times_faster_than_peer_at_its_best", min(peers) / typical, TIMES_FASTER_THAN_BEST,
                "ratio", at_least=True,
            ),
        ],
        samples={"ours_s": seconds, "ours_cpu_s": cpu, "peer_s": peers},
        conditions={
            "peer": peer.REQUIREMENT,
            "peer_poll_s": PEER_POLL_S,
            "peer_times": "recorded in baselines.json" if settings.quick else "this run",
            "relays": RELAYS,
            "workers": WORKERS,
            "checkpoint_bytes": total,
            "publish": "copy",
            "durability": "none",
            "statistic": "the peer's mean (and its best) / our "
            + ("best" if settings.quick else "median"),
        },
    )  # fmt: skip


if __name__ == "__main__":
    main(measure, name="distribute", full=Size(GB, 5), quick=Size(GB, 3))
