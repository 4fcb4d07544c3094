"""A worker on a link that needs the time of thirty versions for one full copy.

origin -> relay -> worker, real processes, each on a machine of its own (`machines.py`); the worker's
cable is so slow that a full copy takes 60 s, and a version comes every 2 s. It begins with nothing. How many
versions it is behind the head is worked out from the times of `published` and `committed`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest import tables
from loadtest.chain import start_chain
from loadtest.checkpoints import bytes_below
from loadtest.machines import Switch
from loadtest.materialize import compare
from loadtest.processes import Event
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree
from loadtest.training import REGIMES, Training

PERIOD_S = 2.0
COPY_PERIODS = 30
FAST_BITS_PER_S = 100_000_000
FIRST_AFTER = 1.5
CAUGHT_UP_AFTER = 2.0
"""The first version, and the head, within so many times the time of a full copy ..."""
BEHIND_THEN = 3
"""... and never more versions behind from then on."""

KEEP = ("--keep", "40")
"""A version must be there for as long as its first full copy takes: 30 versions, and some more."""

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Moment:
    """Seconds since the first publication, the head then, and what the worker was on (0: nothing)."""

    second: float
    head: int
    current: int


def moments(published: Sequence[Event], committed: Sequence[Event]) -> list[Moment]:
    """Return the state after each publication and each commit."""
    began = published[0]["t"]
    head = current = 0
    found = []
    news = [(event["t"], 0, event["version"]) for event in published]
    news += [(event["t"], 1, event["version"]) for event in committed]
    for when, kind, version in sorted(news):
        head, current = (version, current) if kind == 0 else (head, version)
        found.append(Moment((when - began) / 1000, head, current))
    return found


def outcome(line: Sequence[Moment]) -> tuple[float, float, int]:
    """Return when the first version was reached, when the head, and the most versions behind since."""
    first = next(moment.second for moment in line if moment.current)
    at = next(n for n, moment in enumerate(line) if moment.head == moment.current)
    return first, line[at].second, max(moment.head - moment.current for moment in line[at:])


def measure(settings: Settings) -> Report:
    """Publish at a steady pace, and see how far behind the worker is."""
    training = Training(settings.bytes, REGIMES["adam"])
    checkpoint = settings.fresh("checkpoint")
    training.write(checkpoint)
    total = bytes_below(checkpoint)
    slow = round(total * 8 / (PERIOD_S * COPY_PERIODS))
    published: list[Event] = []
    with Switch() as switch, Tree(settings.fresh("tree")) as tree:
        published.append(tree.publish(checkpoint, *KEEP).event)
        began = time.monotonic()
        chain = start_chain(tree, switch, [FAST_BITS_PER_S, FAST_BITS_PER_S, slow], "--materialize")
        for number in range(1, settings.repeats):
            training.step()
            training.write(checkpoint)
            left = began + number * PERIOD_S - time.monotonic()
            chain.worker.process.watch_exit(max(left, 0.0))
            published.append(tree.publish(checkpoint, *KEEP).event)
        chain.worker.wait_committed(published[-1]["version"], timeout=_TIMEOUT_S)
        compare(checkpoint, chain.worker.current)
        worker = chain.worker.process
        committed, ready = worker.events("committed"), worker.events("ready")
        superseded = len(worker.events("superseded"))
        carried = chain.machine.received_bytes
    line = moments(published, committed)
    first, caught_up, behind = outcome(line)
    copy_s = PERIOD_S * COPY_PERIODS
    return Report(
        checks=[
            Check("first_version_s", first, FIRST_AFTER * copy_s, "s"),
            Check("caught_up_s", caught_up, CAUGHT_UP_AFTER * copy_s, "s"),
            Check("versions_behind_then", behind, BEHIND_THEN, "versions"),
        ],
        samples={
            "second": [moment.second for moment in line],
            "head": [moment.head for moment in line],
            "current": [moment.current for moment in line],
            "bytes_fetched": [event["bytes_fetched"] for event in ready],
            "wire_bytes": [carried],
        },
        conditions={
            "version_bytes": total,
            "link_bits_per_s": slow,
            "other_links_bits_per_s": FAST_BITS_PER_S,
            "period_s": PERIOD_S,
            "full_copy_s": PERIOD_S * COPY_PERIODS,
            "versions": len(published),
            "committed": len(committed),
            "superseded": superseded,
            "publisher": "--keep 40, the delta from the version before",
            "relay": "--materialize",
            "regime": "made up, AdamW at 1e-6, fp32 masters, one step a version",
        },
    )


def as_table(report: Report) -> list[str]:
    """Return the report as paragraphs and a table: a row every few seconds, and the commits."""
    seen, facts = report.samples, report.conditions
    line = [
        Moment(second, int(head), int(current))
        for second, head, current in zip(seen["second"], seen["head"], seen["current"], strict=True)
    ]
    first = next(number for number, moment in enumerate(line) if moment.current)
    shown = sorted({*range(0, first, 8), *range(first - 1, first + 8), *range(first, len(line), 8)})
    rows = [
        [
            f"{line[n].second:.1f}",
            str(line[n].head),
            str(line[n].current or "none"),
            str(line[n].head - line[n].current),
        ]
        for n in shown
        if n < len(line)
    ]
    reached, caught_up, behind = outcome(line)
    about = (
        f"`python -m loadtest.slow_link`: origin -> relay -> worker, a namespace and a cable each (tc tbf); the "
        f"worker's carries {facts['link_bits_per_s'] / 1e6:.2f} Mb/s, on which a full copy of the "
        f"{facts['version_bytes'] / 1e6:.1f} MB takes {facts['full_copy_s']:g} s. A version every "
        f"{facts['period_s']:g} s, {facts['versions']} in all ({facts['regime']}). Publisher: "
        f"{facts['publisher']}; relay: {facts['relay']}. The worker begins with nothing: it fetches one full "
        "copy, then the deltas to the head, then each delta as it comes."
    )
    text = (
        f"First version after {reached:.1f} s, the head after {caught_up:.1f} s; from then on at most {behind} "
        f"behind ({facts['committed']} versions committed, {facts['superseded']} left for a newer one on the way). The "
        f"cable carried {seen['wire_bytes'][0] / 1e6:.1f} MB in all, where a full copy of every version would "
        f"have been {facts['versions'] * facts['version_bytes'] / 1e6:.0f} MB. A version has to be retained "
        "(`--keep`) for as long as its first copy takes: with fewer the deltas start from versions that the "
        "worker never had, and it goes from copy to copy."
    )
    header = ["second", "head", "worker's version", "behind"]
    return [about, tables.table(header, rows), text]


if __name__ == "__main__":
    main(
        measure,
        name="slow_link",
        full=Size(20 * MB, 75),
        quick=Size(5 * MB, 45),
        table=("A worker whose link needs thirty versions' time for one copy", as_table),
    )
