"""A slow and a dead relay beside good ones: what they cost against leaving them out.

Relays with `--limit-rate`, so that the network decides and not this machine: three good ones, one
at a tenth of their rate, one that was killed. The same version is pulled from the good ones alone,
with the slow one, and with the dead one; from the first head to *ready*. Bytes that came twice,
because a slow request was raced by a second one, are what the worker counts.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence

from loadtest.checkpoints import write_checkpoint
from loadtest.documents import get
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree, last

TIME_RATIO = 1.10
TWICE_RATIO = 0.02
GOOD_BYTES_PER_S = 40 * MB
PART = 10

_TIMEOUT_S = 300.0


def measure(settings: Settings) -> Report:
    """Compare pulls with a slow and with a dead relay to pulls without."""
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    with Tree(settings.fresh("tree")) as tree:
        version = tree.publish(checkpoint, link=True).version
        origin = tree.origin()

        def relay(name: str, rate: int) -> str:
            made = tree.relay(name, "--limit-rate", str(rate), parents=[origin.url])
            _wait_full(made.url, tree.run, version)
            return made.url

        good = [relay(f"good-{n}", GOOD_BYTES_PER_S) for n in range(3)]
        slow = relay("slow", GOOD_BYTES_PER_S // PART)
        dead = tree.relay("dead", parents=[origin.url])
        os.kill(dead.process.pid, signal.SIGKILL)
        cases = {"left_out": good, "slow": [slow, *good], "dead": [dead.url, *good]}
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        twice: dict[str, list[float]] = {name: [] for name in cases}
        for n in range(settings.repeats):
            for name, sources in cases.items():
                took, again = _pull(tree, settings, f"{name}-{n}", sources)
                seconds[name].append(took)
                twice[name].append(again / total)
    best = {name: min(values) for name, values in seconds.items()}
    return Report(
        checks=[
            Check("slow_relay_time", best["slow"] / best["left_out"], TIME_RATIO, "ratio"),
            Check("dead_relay_time", best["dead"] / best["left_out"], TIME_RATIO, "ratio"),
            # A share of bytes, not a ratio of two programs: nothing to compare with a baseline.
            Check(
                "bytes_twice", max(max(values) for values in twice.values()), TWICE_RATIO, "share"
            ),
        ],
        samples={
            **{f"{name}_s": values for name, values in seconds.items()},
            **{f"{name}_bytes_twice": values for name, values in twice.items()},
        },
        conditions={
            "checkpoint_bytes": total,
            "good_relay_bytes_per_s": GOOD_BYTES_PER_S,
            "slow_relay_bytes_per_s": GOOD_BYTES_PER_S // PART,
            "statistic": "best of the repeats of each side; twice: the worst of all",
        },
    )


def _wait_full(url: str, run: str, version: int) -> None:
    """Let a relay fetch everything first: its parent has no limit, so that takes no time."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        status = json.loads(get(f"{url}/v1/status"))
        if status["runs"].get(run, {}).get("complete") == version:
            return
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not have version {version} within {_TIMEOUT_S:g} s")


def _pull(tree: Tree, settings: Settings, name: str, sources: Sequence[str]) -> tuple[float, float]:
    """Pull once; return the seconds from the first head to ready, and the bytes that came twice."""
    out = settings.fresh(f"out-{name}")
    process = tree.pull(out, sources=sources, name=name, timeout=_TIMEOUT_S)
    begun = process.events("head")[0]["t"]
    ready = last(process, "ready")
    settings.fresh(f"out-{name}")  # makes room
    return (ready["t"] - begun) / 1000, float(ready["bytes_hedged"])


if __name__ == "__main__":
    main(measure, name="sources", full=Size(GB, 3), quick=Size(200 * MB, 2))
