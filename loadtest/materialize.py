"""What leaves the origin while a relay rebuilds full versions from deltas for cold workers.

origin (100 Mb/s) -> relay --materialize. Each version is published, and a worker that has nothing
pulls it from the relay at once. Counted are the bytes of blobs that the origin sends: documents, deltas
and full copies. A second relay without the option shows what it costs otherwise.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from loadtest.checkpoints import bytes_below, write_checkpoint, write_step
from loadtest.processes import Process
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.topology import Relay, Tree, last

UPLINK_BYTES_PER_S = 12_500_000
COPIES = 1.15
"""The first version is a full copy; nine deltas of 1/400 and the documents come on top."""

_PLAIN_VERSIONS = {True: 2, False: 4}
_TIMEOUT_S = 120.0
_STEPS = Path(__file__).resolve().parents[2] / "shared" / "tools" / "steps.py"


def checkpoints(settings: Settings) -> tuple[list[Path], str]:
    """Write consecutive versions; return them, and what they are."""
    root = settings.fresh("checkpoints")
    if _STEPS.is_file() and settings.bytes >= 45 * MB:
        argv = [sys.executable, str(_STEPS), str(root), "0", str(settings.repeats - 1)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S)
        return sorted(root.iterdir()), "steps of MiniLM at learning rate 1e-6"
    made = [root / "000"]
    write_checkpoint(made[0], settings.bytes, weight_files=1)
    for number in range(1, settings.repeats):
        made.append(root / f"{number:03}")
        write_step(made[-2], made[-1], seed=number)
    return made, "synthetic, 0.44 % of the elements change"


def metric(relay: Relay, name: str) -> float:
    """Return a counter of a relay, summed over its labels."""
    with urllib.request.urlopen(f"{relay.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"(?m)^{name}(?:{{.*}})? (\S+)$", text))


def run_side(
    settings: Settings, name: str, versions: list[Path], *options: str
) -> tuple[float, float, list[float]]:
    """Publish versions and pull each cold; return copies sent, shards rebuilt, seconds per pull."""
    root = settings.fresh(name)
    seconds: list[float] = []
    total = 0
    with Tree(root) as tree:
        origin: Relay | None = None
        relay: Relay | None = None
        for checkpoint in versions:
            total = bytes_below(checkpoint)
            version = tree.publish(checkpoint).version
            if origin is None or relay is None:
                origin = tree.origin("--limit-rate", str(UPLINK_BYTES_PER_S))
                relay = tree.relay("relay", *options, parents=[origin.url])
            started = time.monotonic()
            out = root / f"out-{version}"
            pulled: Process = tree.pull(out, sources=[relay.url], name=f"pull-{version}")
            seconds.append(time.monotonic() - started)
            found = last(pulled, "ready")
            if found["version"] != version:
                raise AssertionError(f"pulled version {found['version']} instead of {version}")
            compare(checkpoint, out / "current")
            shutil.rmtree(out)
        assert origin is not None
        assert relay is not None
        sent = metric(origin, "shardcast_sent_bytes_total")
        rebuilt = metric(relay, "shardcast_materialized_shards_total")
    return sent / total, rebuilt, seconds


def compare(checkpoint: Path, got: Path) -> None:
    """Insist that two directories hold the same bytes."""
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        if (got / path.relative_to(checkpoint)).read_bytes() != path.read_bytes():
            raise AssertionError(f"{path.name} came out differently")


def measure(settings: Settings) -> Report:
    """Count what the origin sends for ten versions, with and without rebuilding at the relay."""
    versions, what = checkpoints(settings)
    copies, rebuilt, seconds = run_side(settings, "materialize", versions, "--materialize")
    few = versions[: _PLAIN_VERSIONS[settings.quick]]
    plain, _, plain_seconds = run_side(settings, "plain", few)
    return Report(
        checks=[
            Check("copies_sent_by_origin", copies, COPIES, "copies"),
            Check("shards_rebuilt", rebuilt, len(versions) - 1, "shards", at_least=True),
            Check("copies_for_each_version_otherwise", plain / len(few), 0.9, "copies", True),
        ],
        samples={"cold_pull_s": seconds, "cold_pull_s_otherwise": plain_seconds},
        conditions={
            "versions": len(versions),
            "version_bytes": bytes_below(versions[-1]),
            "checkpoints": what,
            "uplink_bytes_per_s": UPLINK_BYTES_PER_S,
            "counted": "bytes of all blobs that the origin sent: documents, deltas, full copies",
            "workers": "a cold pull from the relay alone right after each publication",
            "versions_otherwise": len(few),
        },
    )


if __name__ == "__main__":
    main(measure, name="materialize", full=Size(45 * MB, 10), quick=Size(45 * MB, 10))
