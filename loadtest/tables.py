"""Result tables: Markdown that says where and when its figures were seen."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, figures to the right."""
    ruler = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in (header, ruler, *rows)]
    return "\n".join(lines)


def seen() -> str:
    """Say on what machine, when, and how busy it was."""
    model = "an unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load, nice = os.getloadavg(), os.nice(0)
    ahead = f", ahead of other work (nice {nice})" if nice < 0 else ""
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {model}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}; load average at the end "
        f"{load[0]:.1f} (1 min), {load[1]:.1f} (5 min){ahead}"
    )


def write(name: str, title: str, *blocks: str, directory: Path = RESULTS) -> Path:
    """Write a results file of paragraphs and tables; return where it is."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.md"
    path.write_text("\n\n".join((f"# {title}", *blocks)) + "\n", encoding="utf-8")
    return path
