"""What a process cost: CPU seconds, peak resident bytes, bytes written, all read from /proc.

Figures come from the kernel's own accounting (proc(5)): CPU time is exact to one clock tick
(10 ms), the peak resident size is the kernel's high-water mark, so nothing is lost between
samples.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# A tree deeper or wider than this is not one of ours: stop rather than walk the machine.
_MAX_PROCESSES = 4096


@dataclass(frozen=True)
class Usage:
    """The bill of one finished command.

    Attributes:
        wall_s: Seconds from spawn to exit.
        cpu_s: User and system seconds, with the children it waited for.
        written_bytes: Bytes passed to write-like system calls (write, sendfile,
            copy_file_range), whatever file system took them.
    """

    wall_s: float
    cpu_s: float
    written_bytes: int


def _stat_fields(pid: int) -> list[str]:
    # The command name (field 2) may hold spaces and parentheses: cut after the last ')'.
    text = Path(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def parent_of(pid: int) -> int:
    """Return the parent's process id, or 0 when `pid` is gone."""
    try:
        return int(_stat_fields(pid)[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def tree(pid: int) -> list[int]:
    """Return `pid` and every living descendant, parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(parent_of(int(name)), []).append(int(name))
    found = [pid]
    for member in found:
        if len(found) > _MAX_PROCESSES:
            raise RuntimeError(f"process tree of {pid} exceeds {_MAX_PROCESSES} members")
        found.extend(children.get(member, []))
    return found


def cpu_seconds(pid: int) -> float:
    """Return user + system seconds of one process and of the children it has waited for.

    A zombie that nobody has waited for yet still answers, which is how the cost of a
    command that just ended is read.
    """
    fields = _stat_fields(pid)
    return sum(int(value) for value in fields[11:15]) / _TICKS_PER_SECOND


def tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a living process tree; members that just ended count zero."""
    return _sum_over(tree(pid), cpu_seconds)


def peak_resident_bytes(pid: int) -> int:
    """Return the high-water mark of one process's resident set (`VmHWM`)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # kernel thread or zombie: no memory


def tree_peak_resident_bytes(pid: int) -> int:
    """Return the sum of the high-water marks of a process tree.

    Pages that members share are counted once for each, and the marks need not have been
    reached at the same moment, so this is an upper bound.
    """
    return int(_sum_over(tree(pid), peak_resident_bytes))


def written_bytes(pid: int) -> int:
    """Return the bytes that a process handed to write-like system calls (`wchar`)."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/io has no wchar line")


def _sum_over(pids: Sequence[int], figure: Callable[[int], float]) -> float:
    total = 0.0
    for pid in pids:
        try:
            total += figure(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return median(ours) / median(theirs) for samples taken interleaved in one run."""
    return statistics.median(ours) / statistics.median(theirs)
