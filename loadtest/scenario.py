"""What every scenario shares: settings, checks with limits, the one JSON line, conditions.

A scenario is a module with a function `measure(settings) -> Report`, run as
`python -m loadtest.NAME [--quick] [--bytes N] [--repeats N] [--work DIR]`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest import tables
from loadtest.processes import scratch, terminate_as_exit

GB = 1_000_000_000
MB = 1_000_000

_TMPFS = Path("/dev/shm")


class UnavailableError(Exception):
    """Something the scenario compares with is not on this machine."""


@dataclass(frozen=True)
class Size:
    """How much a scenario moves and how often it repeats."""

    bytes: int
    repeats: int


@dataclass(frozen=True)
class Settings:
    """What one run of a scenario was asked for.

    Attributes:
        work: An empty directory of its own; removed afterwards.
        bytes: About the size of the checkpoint.
        repeats: How often each side of a comparison runs.
        quick: Whether sizes were reduced.
    """

    work: Path
    bytes: int
    repeats: int
    quick: bool

    def fresh(self, name: str) -> Path:
        """Return an empty directory below `work`, emptied if it exists."""
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Check:
    """A measured value and the limit it must keep.

    Attributes:
        name: Unique within the scenario.
        value: What was measured.
        limit: The bound.
        unit: "ratio", "ms", "MB", ...; only ratios compare across machines.
        at_least: True if the value must not fall below the limit, else must not exceed it.
    """

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the limit is kept."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Report:
    """The outcome of a scenario.

    Attributes:
        checks: What is judged.
        samples: Every single measurement behind the checks, by name and in order.
        conditions: Sizes, topology and options that the figures depend on.
    """

    checks: Sequence[Check]
    samples: Mapping[str, Sequence[float]]
    conditions: Mapping[str, Any] = field(default_factory=dict)


Measure = Callable[[Settings], Report]


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, fstype = line.split()[:3]
        inside = path.is_relative_to(mount.replace("\\040", " "))
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


def environment(work: Path) -> dict[str, Any]:
    """Describe the machine and the programs that the figures belong to."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for package in ("shardcast-cdn", "aiohttp", "blake3", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(work),
        "load_average_1_min_at_end": os.getloadavg()[0],
        "programs": {name: program_version(name) for name in ("nginx", "curl")},
        "packages": versions,
    }


def program_version(name: str) -> str:
    """Return the first line that a program says about its version."""
    if shutil.which(name) is None:
        return "absent"
    flag = "-v" if name == "nginx" else "--version"
    done = subprocess.run([name, flag], capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).splitlines()[0]


def need(program: str) -> None:
    """Insist that a program is installed.

    Raises:
        UnavailableError: It is not.
    """
    if shutil.which(program) is None:
        raise UnavailableError(f"{program} is not installed")


def as_json(name: str, report: Report, settings: Settings, seconds: float) -> dict[str, Any]:
    """Return the JSON form of a report."""
    return {
        "scenario": name,
        "passed": all(check.passed for check in report.checks),
        "checks": [{**asdict(check), "passed": check.passed} for check in report.checks],
        "samples": {key: list(values) for key, values in report.samples.items()},
        "conditions": {
            "bytes": settings.bytes,
            "repeats": settings.repeats,
            "quick": settings.quick,
            **report.conditions,
        },
        "environment": environment(settings.work),
        "seconds": round(seconds, 1),
    }


def main(
    measure: Measure,
    *,
    name: str,
    full: Size,
    quick: Size,
    table: tuple[str, Callable[[Report], list[str]]] | None = None,
) -> None:
    """Run a scenario from the command line and print its JSON line.

    Args:
        measure: The scenario.
        name: Its name.
        full: How much it does by default.
        quick: How much with `--quick`.
        table: Title and blocks of a results file, which `--table` writes.
    """
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller, for every change")
    parser.add_argument("--bytes", type=int, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--work", type=Path, help="where to write; default: /dev/shm")
    if table is not None:
        parser.add_argument(
            "--table", action="store_true", help=f"also write loadtest/results/{name}.md"
        )
    options = parser.parse_args()
    size = quick if options.quick else full
    parent = options.work or (_TMPFS if _TMPFS.is_dir() else None)
    with terminate_as_exit(), scratch("loadtest-", parent) as work:
        settings = Settings(
            work=work,
            bytes=options.bytes or size.bytes,
            repeats=options.repeats or size.repeats,
            quick=options.quick,
        )
        start = time.monotonic()
        try:
            report = measure(settings)
        except UnavailableError as error:
            print(json.dumps({"scenario": name, "passed": False, "unavailable": str(error)}))
            raise SystemExit(3) from error
        seconds = time.monotonic() - start
        print(json.dumps(as_json(name, report, settings, seconds)), flush=True)
        if table is not None and options.table:
            title, blocks = table
            took = f"Seen {tables.seen()}; it took {seconds:.0f} s."
            tables.write(name, title, *blocks(report), took)
