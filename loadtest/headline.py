"""The way of a large version: 1 GB over three hops of 590 Mb/s, from `publish` to durable on a disk.

origin -> relay -> relay -> worker, each on a machine of its own (`machines.py`), made-up runs with the
density of real steps (`training.py`). The worker writes to a real disk and syncs; everything else lies in
memory. A table says when each stage was reached, what it cost in CPU seconds, and what follows from that for
62 GB on 16 cores. All programs share this machine's cores, which bind everything but the cables.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from loadtest import tables
from loadtest.chain import Chain, start_chain
from loadtest.checkpoints import bytes_below
from loadtest.codec import Bench
from loadtest.machines import Switch
from loadtest.materialize import compare
from loadtest.measure import cpu_seconds
from loadtest.processes import Process, scratch
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, file_system, main
from loadtest.topology import Tree
from loadtest.training import REGIMES, Training

LINK_BITS_PER_S: Final = 590_000_000
LARGE_BYTES: Final = 62_000_000_000
LARGE_CORES: Final = 16
RUNS: Final = {"fp32": "adam", "bf16": "adam-bf16"}
FILES: Final = 4
DELTA_VS_COPY: Final = {True: 1.0, False: 0.5}
"""With --quick the version is so small that starting `publish` takes as long as a copy."""

_TIMEOUT_S = 300.0
_TINY_BYTES = 1 * MB

_METER = """
import json, sys, time
path = "/sys/class/net/up0/statistics/rx_bytes"
before = -1
while True:
    with open(path) as file:
        now = int(file.read())
    if now != before:
        print(json.dumps({"event": "carried", "t": time.time() * 1000, "bytes": now}), flush=True)
        before = now
    time.sleep(0.005)
"""


@dataclass(frozen=True)
class Way:
    """When a version reached what, in seconds from the start of `publish`, and what it cost.

    Attributes:
        first_byte: The worker's cable had carried a hundredth of what it carried for it.
        announced: The head that names it was in place.
        heard: The worker had accepted that head.
        last_byte: The cable had carried all but a hundredth.
        ready: Every shard was verified.
        durable: It was committed on the disk.
        publisher_cpu: CPU seconds of `publish`.
        worker_cpu: CPU seconds of the worker meanwhile.
        wire: Bytes that the worker's cable carried.
    """

    first_byte: float
    announced: float
    heard: float
    last_byte: float
    ready: float
    durable: float
    publisher_cpu: float
    worker_cpu: float
    wire: float


def write_versions(settings: Settings, regime: str) -> list[Path]:
    """Write a first version and as many more as asked for; the run's memory is free afterwards."""
    root = settings.fresh(f"checkpoints-{regime}")
    training = Training(settings.bytes, REGIMES[regime])
    made = []
    for number in range(settings.repeats + 1):
        if number:
            training.step()
        made.append(root / f"{number:03}")
        training.write(made[-1], FILES)
    return made


def follow(tree: Tree, chain: Chain, meter: Process, checkpoint: Path, *options: str) -> Way:
    """Publish a version and see it through to the worker's disk."""
    worker = chain.worker.process
    cpu = cpu_seconds(worker.pid)
    published = tree.publish(checkpoint, *options, link=True, timeout=_TIMEOUT_S)
    version, start = published.version, published.process.started_unix_ms
    done = chain.worker.wait_committed(version, timeout=_TIMEOUT_S)
    ready = chain.worker.wait_ready(version, timeout=_TIMEOUT_S)
    heard = next(e for e in worker.events("head") if e["version"] == version)
    cpu = cpu_seconds(worker.pid) - cpu
    seen = [(e["t"], e["bytes"]) for e in meter.events("carried")]
    before = max((count for t, count in seen if t <= start), default=0)
    carried = [(t, count - before) for t, count in seen if start < t <= ready["t"] + 20]
    wire = carried[-1][1]

    def reached(share: float) -> float:
        return next(float(t) for t, count in carried if count >= share * wire)

    def since(t: float) -> float:
        return (t - start) / 1000

    return Way(
        first_byte=since(reached(0.01)),
        announced=since(published.event["t"]),
        heard=since(heard["t"]),
        last_byte=since(reached(0.99)),
        ready=since(ready["t"]),
        durable=since(done["t"]),
        publisher_cpu=published.process.usage.cpu_s,
        worker_cpu=cpu,
        wire=float(wire),
    )


def run_side(
    settings: Settings, name: str, versions: Sequence[Path], disk: Path
) -> tuple[float, list[Way]]:
    """Take all versions to the worker; return how long the first, a copy, took, and the others' ways."""
    with Switch() as switch, Tree(settings.fresh(name), durability="sync") as tree:
        keep = ["--keep", "2"]
        first = tree.publish(versions[0], *keep, link=True).version
        out = disk / name
        rates = [LINK_BITS_PER_S] * 4
        chain = start_chain(tree, switch, rates, "--prefetch", "deltas", out=out)
        head = chain.worker.process.wait_event("head", timeout=_TIMEOUT_S)
        ready = chain.worker.wait_ready(first, timeout=_TIMEOUT_S)
        chain.worker.wait_committed(first, timeout=_TIMEOUT_S)
        copy_s = (ready["t"] - head["t"]) / 1000
        argv = chain.machine.argv(sys.executable, "-c", _METER)
        meter = tree.processes.start(argv, name="meter")
        meter.wait_event("carried", timeout=10)
        ways = [follow(tree, chain, meter, checkpoint, *keep) for checkpoint in versions[1:]]
        compare(versions[-1], chain.worker.current)
    return copy_s, ways


def rates(versions: Sequence[Path]) -> dict[str, float]:
    """Return what one core does of each kind of work, in GB of the version a second."""
    name = f"model-00001-of-{FILES:05}.safetensors"
    new, old = (directory / name for directory in (versions[-1], versions[-2]))
    bench = Bench(new.read_bytes(), old.read_bytes())
    bench.check()
    bench.run(5)
    found = {kind: bench.rate(kind) for kind in ("blake3", "encode", "decode", "decode_verify")}
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for piece, _, _ in bench.jobs:
            xxhash.xxh3_128_digest(piece)
        best = min(best, time.thread_time() - start)
    return {**found, "xxh3": bench.size / best / 1e9}


def fixed_cpu(settings: Settings) -> float:
    """Return the CPU seconds of a `publish` with almost nothing to do: interpreter, keys, documents."""
    training = Training(_TINY_BYTES)
    checkpoint = settings.fresh("tiny")
    best = float("inf")
    with Tree(settings.fresh("tiny-tree")) as tree:
        for _ in range(3):
            training.step()
            training.write(checkpoint)
            best = min(best, tree.publish(checkpoint).process.usage.cpu_s)
    return best


def measure(settings: Settings) -> Report:
    """Take versions of both regimes to a worker's disk."""
    checks: list[Check] = []
    samples: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    total = 0
    kind = ""
    with scratch("headline-", Path(tempfile.gettempdir())) as disk:
        kind = file_system(disk)
        for name, regime in RUNS.items():
            versions = write_versions(settings, regime)
            total = bytes_below(versions[0])
            copy_s, ways = run_side(settings, name, versions, disk)
            speeds = speeds or rates(versions)
            settings.fresh(f"checkpoints-{regime}")  # makes room
            settings.fresh(name)
            best = min(ways, key=lambda way: way.ready)
            limit = DELTA_VS_COPY[settings.quick]
            checks.append(Check(f"{name}_ready_vs_copy", best.ready / copy_s, limit, "of the time"))
            samples[f"{name}_copy_s"] = [copy_s]
            for member in Way.__dataclass_fields__:
                samples[f"{name}_{member}"] = [float(getattr(way, member)) for way in ways]
    samples["fixed_cpu"] = [fixed_cpu(settings)]
    samples |= {f"gb_s_{kind_}": [rate] for kind_, rate in speeds.items()}
    return Report(
        checks=checks,
        samples=samples,
        conditions={
            "version_bytes": total,
            "link_bits_per_s": LINK_BITS_PER_S,
            "chain": "origin -> relay -> relay -> worker, a namespace and a cable each (tc tbf)",
            "publisher": "publish --link --keep 2",
            "relays": "--prefetch deltas: they pass on, and take no core from the others",
            "worker": f"--durability sync, on {kind}",
            "regimes": "made up, AdamW at 1e-6, one step a version: fp32 masters, bf16 only",
            "statistic": "the way with the earliest ready",
        },
    )


# --- the table ------------------------------------------------------------------------------


def _best(report: Report, name: str) -> Way:
    members = {m: report.samples[f"{name}_{m}"] for m in Way.__dataclass_fields__}
    ready = members["ready"]
    at = ready.index(min(ready))
    return Way(**{m: values[at] for m, values in members.items()})


def _stages(report: Report) -> str:
    header = ["seconds from the start of `publish` to", "fp32 masters", "bf16 only"]
    ways = [_best(report, name) for name in RUNS]
    rows = [
        [what, *(f"{getattr(way, member):.2f}" for way in ways)]
        for what, member in (
            ("the first bytes on the worker's cable", "first_byte"),
            ("announced (hashed, encoded, tried; documents and head in place)", "announced"),
            ("the worker has the head", "heard"),
            ("the last bytes on the worker's cable", "last_byte"),
            ("**ready**: every shard rebuilt and verified", "ready"),
            ("**durable**: synced and committed", "durable"),
        )
    ]
    every = [", ".join(f"{s:.2f}" for s in report.samples[f"{name}_ready"]) for name in RUNS]
    rows.append(["(ready, of each version in turn; above is the quickest)", *every])
    copies = [report.samples[f"{name}_copy_s"][0] for name in RUNS]
    rows.append(["(a full copy, from head to ready)", *(f"{copy:.2f}" for copy in copies)])
    rows.append(["bytes on the worker's cable", *(f"{way.wire:,.0f}" for way in ways)])
    total = report.conditions["version_bytes"]
    rows.append(["... of the version", *(f"1/{total / way.wire:.0f}" for way in ways)])
    rows.append(["CPU seconds of `publish`", *(f"{way.publisher_cpu:.2f}" for way in ways)])
    rows.append(["CPU seconds of the worker", *(f"{way.worker_cpu:.2f}" for way in ways)])
    return tables.table(header, rows)


def _work(report: Report) -> str:
    def speed(kind: str) -> float:
        return report.samples[f"gb_s_{kind}"][0]

    gb = report.conditions["version_bytes"] / 1e9
    verify = 1 / (1 / speed("decode_verify") - 1 / speed("decode"))
    rows = [
        [who, what, f"{rate:.1f}", f"{gb / rate:.2f}"]
        for who, what, rate in (
            ("publisher", "hash (BLAKE3)", speed("blake3")),
            ("publisher", "look at the base (xxh3)", speed("xxh3")),
            ("publisher", "encode", speed("encode")),
            ("publisher", "try: decode", speed("decode")),
            ("worker", "decode", speed("decode")),
            ("worker", "verify (BLAKE3 of what was decoded)", verify),
            ("worker", "xxh3, for later looks", speed("xxh3")),
        )
    ]
    return tables.table(["who", "what", "GB/s a core", f"CPU s for {gb:.2f} GB"], rows)


def _large(report: Report) -> str:
    total = report.conditions["version_bytes"]
    times = LARGE_BYTES / total
    start = report.samples["fixed_cpu"][0]
    rows = []
    for name, what in (("fp32", "fp32 masters"), ("bf16", "bf16 only")):
        way = _best(report, name)
        own = way.publisher_cpu - start
        encode = start + own * times / LARGE_CORES
        transfer = way.wire * times * 8 / LINK_BITS_PER_S
        decode = way.worker_cpu * times / LARGE_CORES
        fixed = way.heard - way.announced
        least = encode + fixed
        rows.append(
            [
                what,
                f"{start:.2f} + {own:.2f} x {times:.1f} / {LARGE_CORES} = {encode:.1f} s",
                f"{way.wire * times / 1e6:.1f} MB x 8 / 590 Mb/s = {transfer:.2f} s",
                f"{way.worker_cpu:.2f} x {times:.1f} / {LARGE_CORES} = {decode:.1f} s",
                f"{fixed:.2f} s",
                f"{least + max(transfer, decode):.1f} to {least + transfer + decode:.1f} s",
            ]
        )
    header = ["weights", "hash, encode, try", "transfer", "decode, verify, write", "announce"]
    header.append("to ready: overlapped, or one after the other")
    return tables.table(header, rows)


def as_table(report: Report) -> list[str]:
    """Return the report as paragraphs and tables."""
    facts = report.conditions
    copy_s = LARGE_BYTES * 8 / LINK_BITS_PER_S
    about = (
        f"`python -m loadtest.headline`: {facts['version_bytes'] / 1e9:.2f} GB of bf16 in {FILES} files, "
        f"{facts['regimes']}. {facts['chain']}, {LINK_BITS_PER_S / 1e6:g} Mb/s each way. Publisher: "
        f"`{facts['publisher']}`; relays: `{facts['relays'].split(':')[0]}`, so that the two cores of this "
        f"machine are left to the publisher and the worker; worker: `{facts['worker']}`. Everything but the "
        "worker's directory lies in memory. Every program shares the two cores: with cores of their own only "
        "the stages that the CPU binds would be shorter."
    )
    large = (
        f"## {LARGE_BYTES / 1e9:g} GB on {LARGE_CORES} cores, by arithmetic\n\nNot measured. CPU seconds above "
        f"(file system and threads included), less those of a `publish` of next to nothing, times {LARGE_BYTES / 1e9:g} GB over the "
        f"size above, over {LARGE_CORES} cores, as if they shared the work perfectly and memory kept up; bytes "
        "above over the link's rate. "
        f"A full copy is {LARGE_BYTES / 1e9:g} GB x 8 / 590 Mb/s = {copy_s:.0f} s. *Durable* adds what the disk "
        f"needs for {LARGE_BYTES / 1e9:g} GB ({LARGE_BYTES / 2e9:.0f} s at 2 GB/s), less what it wrote meanwhile."
    )
    return [
        about,
        _stages(report),
        "What the work costs on one core (best of 5, one file of the version, in turn):",
        _work(report),
        large,
        _large(report),
    ]


if __name__ == "__main__":
    main(
        measure,
        name="headline",
        full=Size(GB, 3),
        quick=Size(100 * MB, 2),
        table=("1 GB over three hops of 590 Mb/s", as_table),
    )
