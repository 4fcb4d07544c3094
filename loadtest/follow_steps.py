"""Real training steps through origin -> relay -> relay -> worker, every machine on 100 Mb/s.

Each machine is a network namespace on a cable of its own (`machines.py`). The 33 steps of
data/minilm-steps (made-up ones where they do not lie beside the repository) are published one after the
other, as soon as the worker has committed the one before; then some of them again without deltas, to
fresh machines. Bytes are what the cable into the worker carried, headers and polls included; times are
from the `published` event to `committed`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest import tables
from loadtest.chain import start_chain
from loadtest.checkpoints import bytes_below
from loadtest.machines import Switch
from loadtest.materialize import checkpoints, compare
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree

LINK_BITS_PER_S = 100_000_000
WIRE_SHARE = 1 / 300
"""Everything on the worker's cable for a step, against the version: deltas are 1/517 of it."""
TIME_RATIO = 0.35

_FULL_COPIES = {True: 2, False: 6}
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Step:
    """One version's way to the worker.

    Attributes:
        seconds: From `published` to `committed`.
        whole_s: From the start of `publish` to `committed`.
        wire: Bytes on each cable of a receiver: the relays in their order, the worker.
        fetched: What the worker says it fetched.
    """

    seconds: float
    whole_s: float
    wire: Sequence[int]
    fetched: int


def run_side(
    settings: Settings, name: str, versions: Sequence[Path], *relay_options: str, delta: bool
) -> list[Step]:
    """Publish versions one after the other; return how each but the first went."""
    options = [] if delta else ["--no-delta"]
    steps: list[Step] = []
    with Switch() as switch, Tree(settings.fresh(name)) as tree:
        first = tree.publish(versions[0], *options).version
        chain = start_chain(tree, switch, [LINK_BITS_PER_S] * 4, *relay_options)
        chain.worker.wait_committed(first, timeout=_TIMEOUT_S)
        chain.settle(tree.run, first, timeout=_TIMEOUT_S)
        cables = [*(hop.machine for hop in chain.hops[1:]), chain.machine]
        for checkpoint in versions[1:]:
            before = [cable.received_bytes for cable in cables]
            published = tree.publish(checkpoint, *options)
            done = chain.worker.wait_committed(published.version, timeout=_TIMEOUT_S)
            wire = [cable.received_bytes - was for cable, was in zip(cables, before, strict=True)]
            steps.append(
                Step(
                    (done["t"] - published.event["t"]) / 1000,
                    (done["t"] - published.process.started_unix_ms) / 1000,
                    wire,
                    int(done["bytes_fetched"]),
                )
            )
        compare(versions[-1], chain.worker.current)
    return steps


def measure(settings: Settings) -> Report:
    """Follow all steps, and some of them as full copies."""
    versions, what = checkpoints(settings)
    total = bytes_below(versions[-1])
    followed = run_side(settings, "deltas", versions, "--materialize", delta=True)
    few = versions[: 1 + _FULL_COPIES[settings.quick]]
    copied = run_side(settings, "copies", few, delta=False)
    seconds = [step.seconds for step in followed]
    wire = [step.wire[-1] for step in followed]
    full = [step.seconds for step in copied]
    return Report(
        checks=[
            Check("worst_wire_share", max(wire) / total, WIRE_SHARE, "share"),
            Check(
                "delta_vs_full_copy",
                statistics.median(seconds) / statistics.median(full),
                TIME_RATIO,
                "of the time",
            ),
        ],
        samples={
            "published_to_committed_s": seconds,
            "publish_to_committed_s": [step.whole_s for step in followed],
            "wire_bytes_to_worker": wire,
            "wire_bytes_to_relay_1": [step.wire[0] for step in followed],
            "wire_bytes_to_relay_2": [step.wire[1] for step in followed],
            "bytes_fetched": [step.fetched for step in followed],
            "full_copy_s": full,
            "full_copy_whole_s": [step.whole_s for step in copied],
            "full_copy_wire_bytes": [step.wire[-1] for step in copied],
        },
        conditions={
            "checkpoints": what,
            "steps": len(followed),
            "version_bytes": total,
            "full_copies": len(copied),
            "link_bits_per_s": LINK_BITS_PER_S,
            "chain": "origin -> relay -> relay -> worker, a namespace and a cable each (tc tbf)",
            "relays": "--materialize with deltas, default without",
            "pace": "the next step is published when the worker has committed the one before",
            "statistic": "medians; wire: the worst step",
        },
    )


def as_table(report: Report) -> list[str]:
    """Return the report as paragraphs and a table."""
    seen, facts = report.samples, report.conditions
    total = facts["version_bytes"]

    def row(name: str, seconds: str, whole: str, wire: str) -> list[str]:
        times, wholes, counts = seen[seconds], seen[whole], seen[wire]
        middle = statistics.median
        return [
            name,
            str(len(times)),
            f"{middle(times):.2f} s",
            f"{max(times):.2f} s",
            f"{middle(wholes):.2f} s",
            f"{max(wholes):.2f} s",
            f"{middle(counts):,.0f}",
            f"{max(counts):,.0f}",
            f"1/{total / middle(counts):.0f}" if middle(counts) < total else "1",
        ]

    names = ["", "steps", "published to committed, median", "worst", "with `publish`, median"]
    names += ["worst", "bytes on the worker's cable, median", "worst", "of the version"]
    rows = [
        row("deltas", "published_to_committed_s", "publish_to_committed_s", "wire_bytes_to_worker"),
        row("full copies", "full_copy_s", "full_copy_whole_s", "full_copy_wire_bytes"),
    ]
    per_step = [
        [str(n), f"{time:.3f}", f"{whole:.3f}", *(f"{count:,.0f}" for count in counts)]
        for n, (time, whole, *counts) in enumerate(
            zip(
                seen["published_to_committed_s"],
                seen["publish_to_committed_s"],
                seen["wire_bytes_to_relay_1"],
                seen["wire_bytes_to_relay_2"],
                seen["wire_bytes_to_worker"],
                seen["bytes_fetched"],
                strict=True,
            ),
            1,
        )
    ]
    columns = [
        "step",
        "published to committed (s)",
        "with `publish` (s)",
        "wire to relay 1 (bytes)",
    ]
    columns += ["wire to relay 2", "wire to the worker", "the worker's `bytes_fetched`"]
    about = (
        f"`python -m loadtest.follow_steps`: {facts['checkpoints']}, {total / 1e6:.1f} MB a version, "
        f"{facts['chain']}, {LINK_BITS_PER_S / 1e6:g} Mb/s each way. Relays: {facts['relays']}. "
        f"{facts['pace'].capitalize()}. Wire bytes include the headers of every packet, polls and "
        "documents. `publish` starts a Python process, hashes and encodes; all programs share this "
        "machine's cores, and everything but the link is bound by them."
    )
    return [about, tables.table(names, rows), tables.table(columns, per_step)]


if __name__ == "__main__":
    main(
        measure,
        name="follow_steps",
        full=Size(45 * MB, 34),
        quick=Size(45 * MB, 6),
        table=("Real steps through three hops of 100 Mb/s", as_table),
    )
