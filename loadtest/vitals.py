"""What a process holds, and a run's directory, and whether that grows.

Descriptors by kind, threads and resident memory come from /proc; a directory is searched for what
nobody will ever look at again.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMED = frozenset({"file", "directory"})
"""What has a name is as many as there are versions on disk, and those come and go with readers."""
_NUMBER = re.compile(r"^[0-9]{6,16}$")
_STATE = re.compile(r"^([0-9]{6,16})\.(?:json|shards)$")


@dataclass(frozen=True)
class Vitals:
    """What a process held at one moment.

    Attributes:
        descriptors: How many of each kind: socket, pipe, eventpoll, deleted, file, directory; and
            `same file`, `same directory` for a second descriptor of one name.
        deleted: Paths of open files that have no name any more.
        threads: How many threads.
        resident: Bytes.
    """

    descriptors: Counter[str]
    deleted: tuple[str, ...]
    threads: int
    resident: int


def vitals(pid: int) -> Vitals:
    """Read a process's vitals.

    Raises:
        FileNotFoundError, ProcessLookupError: It is gone.
    """
    kinds: Counter[str] = Counter()
    deleted = []
    named: set[str] = set()
    base = Path(f"/proc/{pid}/fd")
    for name in os.listdir(base):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(base / name)
            kind = _kind(base / name, target)
            if kind in _NAMED and target in named:
                kind = f"same {kind}"
            named.add(target)
            kinds[kind] += 1
            if kind == "deleted":
                deleted.append(target)
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return Vitals(kinds, tuple(sorted(deleted)), threads, resident_bytes(pid))


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kind(link: Path, target: str) -> str:
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    if ":" in target and not target.startswith("/"):
        return target.split(":", 1)[0]
    if target.endswith(" (deleted)"):
        return "deleted"
    if link.is_char_device():
        return "device"
    return "directory" if link.is_dir() else "file"


@dataclass(frozen=True)
class Bounds:
    """What a process may hold.

    Attributes:
        slack: By how many a kind of descriptor may grow; a file without a name is one too many.
        socket_slack: The same for sockets.
        sockets: How many sockets there may be at all.
        threads: How many threads: pools grow up to their bounds.
    """

    slack: int
    socket_slack: int
    sockets: int
    threads: int


def grown(before: Vitals, after: Vitals, bounds: Bounds) -> list[str]:
    """Return what grew from one moment of rest to another beyond its bounds."""
    sockets = min(bounds.socket_slack, bounds.sockets - before.descriptors["socket"])
    found = [
        f"{kind} {before.descriptors[kind]} -> {count}"
        for kind, count in sorted(after.descriptors.items())
        if kind not in {"deleted", *_NAMED}
        and count > before.descriptors[kind] + (sockets if kind == "socket" else bounds.slack)
    ]
    found += [f"deleted but open: {path}" for path in after.deleted]
    if after.threads > bounds.threads:
        found.append(f"threads {before.threads} -> {after.threads}")
    return found


def growth_bytes(samples: Sequence[tuple[float, int]]) -> float:
    """Return by how much memory grew over samples of (seconds, bytes), as a robust line has it.

    Theil-Sen: the median of the slopes between all pairs, times the length. A peak in the
    middle does not count, a step that stays does.
    """
    slopes = [
        (b - a) / (t - s)
        for position, (s, a) in enumerate(samples)
        for t, b in samples[position + 1 :]
        if t > s
    ]
    if not slopes:
        return 0.0
    return statistics.median(slopes) * (samples[-1][0] - samples[0][0])


def leftovers(home: Path) -> list[str]:
    """Return what lies in a run's directory (docs/PROTOCOL.md, "Store") and serves nobody.

    Temporary files, trash, state of versions that are gone, and staging of versions older than the
    newest committed one. Call it where nothing is on its way.
    """
    state = home / "state"
    committed = _numbers(home / "versions")
    staged = _numbers(state / "staging")
    newest = max(committed, default=0)
    found = [f"state/staging/{n:06d}" for n in sorted(staged) if n <= newest]
    for directory in (state / "tmp", state / "trash"):
        found += [str(path.relative_to(home)) for path in _entries(directory)]
    for path in _entries(state):
        match = _STATE.match(path.name)
        if match and int(match[1]) not in committed | staged:
            found.append(str(path.relative_to(home)))
    found += [
        str(path.relative_to(home))
        for path in home.rglob(".*.tmp")
        if "versions" not in path.relative_to(home).parts
    ]
    return sorted(set(found))


def _entries(directory: Path) -> Iterable[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return ()


def _numbers(directory: Path) -> set[int]:
    return {int(path.name) for path in _entries(directory) if _NUMBER.match(path.name)}
