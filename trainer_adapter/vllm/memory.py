"""How much memory is left for a second copy of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")


_GROUPS: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Of control groups, version 2 and 1: the limit, what is used, what of it is files that can go."""


def available_memory(root: Path = _ROOT) -> int | None:
    """Return how many bytes this process could still use before somebody is killed for it.

    What the kernel says of the host, or less where a control group (the one seen as the root: a
    container's own) limits it; the files that the group has cached do not count.

    Args:
        root: Where ``proc`` and ``sys`` are.

    Returns:
        None where the system does not tell.
    """
    host = _members(root / "proc/meminfo").get("MemAvailable:")
    if host is None:
        return None
    free = host * 1024
    for limit, usage, files in _GROUPS:
        path = root / "sys/fs/cgroup" / limit
        most, used = _number(path), _number(root / "sys/fs/cgroup" / usage)
        if most is not None and used is not None:
            cached = _members(path.with_name("memory.stat")).get(files, 0)
            free = min(free, max(0, most - used + cached))
    return free


def _members(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
