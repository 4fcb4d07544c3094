"""What publishing a directory costs beyond hashing it, in seconds and in bytes written.

With `--link`: against a process that only hashes the same files with BLAKE3 on as many threads.
Without: against the slower of that and `cp -r` (without reflink). On a warm page cache.

Linking is compared by the time that each process says its work took (`seconds` of its event: all
that happens between reading the options and the announcement, against the hashing alone), because
at this size the start of the interpreter is as long as the work: the samples of whole processes,
`publish_link_s`, `publish_3_bytes_s` and `hash_..._s`, stand beside it. Copying is compared by
whole processes, from spawn to exit, nothing subtracted.

What a delta adds is told in CPU seconds, which is what it takes: a step of 0.44 % published with
`--link`, less what an almost empty version costs, against the CPU of hashing the same bytes, less
the start of that interpreter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

from loadtest.checkpoints import write_checkpoint, write_step
from loadtest.hashing import WAYS
from loadtest.processes import Process, Processes
from loadtest.scenario import GB, MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree

LINK_RATIO = 1.3
COPY_RATIO = 1.3
# Documents and state of a 1 GB version are about 20 KB; a single shard would be 8 MB.
LINK_WRITTEN_MB = 1.0
# Hash the target, check the base, encode, decode and compare (docs/adr/0015); about 5x.
DELTA_CPU_RATIO = 8.0

_TIMEOUT_S = 120.0
_CPU_REPEATS = 2
"""CPU seconds hardly vary."""


def hash_files(processes: Processes, directory: Path, way: str, threads: int) -> Process:
    """Run the hashing floor to its end."""
    argv = [sys.executable, "-m", "loadtest.hashing", str(directory)]
    argv += ["--way", way, "--threads", str(threads)]
    return processes.run(argv, name=f"hash-{way}", timeout=_TIMEOUT_S)


def copy_files(processes: Processes, source: Path, target: Path) -> Process:
    """Run `cp -r` to its end; the copy is removed again."""
    argv = ["cp", "-r", "--reflink=never", str(source), str(target)]
    process = processes.run(argv, name="cp", timeout=_TIMEOUT_S)
    shutil.rmtree(target)
    return process


def publish(root: Path, checkpoint: Path, *, link: bool) -> Process:
    """Publish as the first version of a fresh store; the store is removed again."""
    with Tree(root) as tree:
        process = tree.publish(checkpoint, link=link).process
    shutil.rmtree(root)
    return process


def publish_step(root: Path, checkpoint: Path, step: Path, *options: str) -> Process:
    """Publish a checkpoint and then a step of it; return the second publication."""
    with Tree(root) as tree:
        tree.publish(checkpoint, "--no-delta", link=True)
        process = tree.publish(step, *options, link=True).process
    shutil.rmtree(root)
    return process


def delta_cpu(settings: Settings, processes: Processes, checkpoint: Path) -> dict[str, float]:
    """Return the CPU seconds of one round: hashing, and publishing a step without and with a delta."""
    step, tiny = settings.work / "step", settings.work / "tiny"
    if not step.exists():
        write_step(checkpoint, step)
    root = settings.work / "stepped"
    return {
        "hash_cpu_s": min(hash_files(processes, checkpoint, w, 1).usage.cpu_s for w in WAYS),
        "hash_3_bytes_cpu_s": hash_files(processes, tiny, "read-files", 1).usage.cpu_s,
        "publish_3_bytes_cpu_s": publish_step(root, tiny, tiny).usage.cpu_s,
        "publish_step_no_delta_cpu_s": publish_step(
            root, checkpoint, step, "--no-delta"
        ).usage.cpu_s,
        "publish_step_cpu_s": publish_step(root, checkpoint, step).usage.cpu_s,
    }


def _work_s(process: Process, event: str) -> float:
    return float(process.wait_event(event, timeout=1)["seconds"])


def measure(settings: Settings) -> Report:
    """Compare publishing with hashing and copying the same files."""
    threads = os.cpu_count() or 1
    checkpoint = settings.fresh("checkpoint")
    total = write_checkpoint(checkpoint, settings.bytes)
    wall: dict[str, list[float]] = defaultdict(list)
    written: list[float] = []
    tiny = settings.fresh("tiny")
    (tiny / "config.json").write_text("{}\n")
    with Processes(settings.work / "logs") as processes:
        for _ in range(settings.repeats):
            for way in WAYS:
                process = hash_files(processes, checkpoint, way, threads)
                wall[f"hash_{way}_s"].append(process.usage.wall_s)
                wall[f"hash_{way}_work_s"].append(_work_s(process, "hashed"))
            process = publish(settings.work / "linked", checkpoint, link=True)
            wall["publish_link_s"].append(process.usage.wall_s)
            wall["publish_link_work_s"].append(_work_s(process, "published"))
            written.append(process.usage.written_bytes / MB)
            usage = publish(settings.work / "started", tiny, link=True).usage
            wall["publish_3_bytes_s"].append(usage.wall_s)
            usage = copy_files(processes, checkpoint, settings.work / "copied").usage
            wall["cp_s"].append(usage.wall_s)
            usage = publish(settings.work / "stored", checkpoint, link=False).usage
            wall["publish_copy_s"].append(usage.wall_s)
        for _ in range(_CPU_REPEATS):
            for name, seconds in delta_cpu(settings, processes, checkpoint).items():
                wall[name].append(seconds)
    hashing = min(min(wall[f"hash_{way}_s"]) for way in WAYS)
    slower = max(hashing, min(wall["cp_s"]))
    hashing_work = min(min(wall[f"hash_{way}_work_s"]) for way in WAYS)
    linked = min(wall["publish_link_work_s"])
    stored = min(wall["publish_copy_s"])
    least = {name: min(values) for name, values in wall.items()}
    hashing_cpu = least["hash_cpu_s"] - least["hash_3_bytes_cpu_s"]
    step_cpu = least["publish_step_cpu_s"] - least["publish_3_bytes_cpu_s"]
    return Report(
        checks=[
            Check("publish_link_vs_blake3", linked / hashing_work, LINK_RATIO, "ratio"),
            Check("publish_link_written", max(written), LINK_WRITTEN_MB, "MB"),
            Check("publish_copy_vs_slower_floor", stored / slower, COPY_RATIO, "ratio"),
            Check("publish_step_cpu_vs_blake3", step_cpu / hashing_cpu, DELTA_CPU_RATIO, "ratio"),
        ],
        samples={**wall, "publish_link_written_mb": written},
        conditions={
            "checkpoint_bytes": total,
            "threads": threads,
            "statistic": "minima of interleaved runs; best of the hashing ways",
        },
    )


if __name__ == "__main__":
    main(measure, name="publish", full=Size(GB, 7), quick=Size(GB, 5))
