"""Files of evicted versions, kept to be overwritten by the next version's bytes.

Writing to pages that a file has already costs a third of writing to fresh ones, and freeing them
costs as much again (docs/adr/0008). But an inode may be overwritten only when nothing can read
it any more. A file becomes a *spare* when its version is evicted: it is renamed to
``state/spare/``, after the version's journal is gone, and that is made durable before the first
byte is overwritten. It is *claimed* for a staged version only if

- it has one link, and it is a regular file;
- the kernel grants a write lease on it, which it does only while no other process and no other
  descriptor has it open or mapped;
- it has rested: whoever had found its old name just before it was taken away has it open by now.

Anything else is unlinked, and its readers keep their bytes. What was sent by ``sendfile`` may lie
in a socket's buffer *as the file's own pages* long after the descriptor is closed, and no lease
tells; so a directory that is served is not recycled (``WorkerSession``).

Crash windows: killed at any instant, a file is under ``state/trash`` (removed at the next start),
under ``state/spare`` (claimed or removed), or staged without a record in any journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from shardcast.store.files import file_system_of, fsync_directory

FILE_SYSTEMS: Final = frozenset({"tmpfs", "ext4"})
"""Where overwriting was measured to be cheaper than fresh blocks, and a lease sees every mapping.

On overlayfs it does not: a mapping holds the file below. On btrfs overwriting is copying.
"""

MIN_BYTES: Final = 1 << 20
"""Below this a file is made anew as fast as a spare is looked at."""

REST_S: Final = 1.0
"""An ``open`` that found the old name has ended by then, however busy the machine is."""

_unique = itertools.count()


def match(wanted: Mapping[str, int], spares: Mapping[str, int]) -> dict[str, str]:
    """Decide which spare becomes which file: equal sizes first, then the largest by the largest.

    Args:
        wanted: Bytes of each file that is to be made, by path.
        spares: Bytes of each spare, by name.

    Returns:
        The spare's name for each path that gets one.
    """
    by_size: dict[int, list[str]] = {}
    for name in sorted(spares):
        by_size.setdefault(spares[name], []).append(name)
    chosen: dict[str, str] = {}
    for path, size in sorted(wanted.items()):
        if size >= MIN_BYTES and by_size.get(size):
            chosen[path] = by_size[size].pop()
    largest_first = sorted(
        (path for path, size in wanted.items() if size >= MIN_BYTES and path not in chosen),
        key=lambda path: (-wanted[path], path),
    )
    left = sorted(set(spares) - set(chosen.values()), key=lambda name: (-spares[name], name))
    chosen.update(zip(largest_first, left, strict=False))
    return chosen


def has_room(*, committed: int, staged: int, keep: int) -> bool:
    """Say whether a version's worth of spares fits beside what stays, within ``keep`` + 1."""
    return committed + staged <= keep


class Spares:
    """The spares of one run's directory; only the process that holds its lock uses them."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Look at nothing yet.

        Args:
            directory: Where they lie, on the versions' file system.
            clock: Seconds since the epoch, as the file system's change times count.
        """
        self._directory = directory
        self._clock = clock

    def names(self) -> list[str]:
        """Return the names of the spares."""
        try:
            return sorted(os.listdir(self._directory))
        except OSError:
            return []

    def keep(self, directory: Path, paths: Iterable[str]) -> None:
        """Make the files of a version that has lost its name spares; earlier spares are dropped.

        What cannot be one stays where it is.
        """
        self.drop()
        with contextlib.suppress(OSError):
            os.makedirs(self._directory, exist_ok=True)
            for path in paths:
                with contextlib.suppress(OSError):
                    file = directory / path
                    found = os.stat(file, follow_symlinks=False)
                    if _may_be_spare(found) and found.st_size >= MIN_BYTES:
                        os.rename(file, self._directory / f"{os.getpid()}.{next(_unique)}")

    def claim(self, directory: Path, wanted: Mapping[str, int]) -> dict[str, str]:
        """Move spares to where a staged version needs files; all others are dropped.

        A file may come out shorter than wanted, never longer; its bytes are of another version.

        Args:
            directory: Of the staged version.
            wanted: Bytes of its files, by path; those that are there already get no spare.

        Returns:
            The spare's name for each path that got one.
        """
        sizes: dict[str, int] = {}
        for name in self.names():
            with contextlib.suppress(OSError):
                sizes[name] = os.stat(self._directory / name, follow_symlinks=False).st_size
        lacking = {p: n for p, n in wanted.items() if not os.path.lexists(directory / p)}
        claimed: dict[str, str] = {}
        chosen = match(lacking, sizes)
        if chosen and not self._eviction_is_durable():
            chosen = {}
        for path, name in chosen.items():
            with contextlib.suppress(OSError):
                if self._claim(self._directory / name, directory / path, wanted[path]):
                    claimed[path] = name
        self.drop()
        return claimed

    def _eviction_is_durable(self) -> bool:
        """Put the renames that led here on stable storage, and with them all that came before.

        Else a power cut could undo them after the first bytes were overwritten, and the evicted
        version would be back under its name with bytes of another one.
        """
        try:
            fsync_directory(self._directory)
        except OSError:
            return False
        return True

    def drop(self) -> None:
        """Remove every spare; readers that still have one keep its bytes."""
        for name in self.names():
            with contextlib.suppress(OSError):
                os.unlink(self._directory / name)

    def _claim(self, spare: Path, target: Path, size: int) -> bool:
        # Not blocking: somebody else may hold a lease on it.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(spare, flags)
        try:  # closing gives the lease back
            if not take_write_lease(fd):
                return False
            found = os.fstat(fd)
            if not _may_be_spare(found) or self._clock() - found.st_ctime < REST_S:
                return False
            if found.st_size > size:
                os.ftruncate(fd, size)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(spare, target)
        finally:
            os.close(fd)
        return True


def take_write_lease(fd: int) -> bool:
    """Take a write lease (fcntl(2)): nothing else has the file open or mapped, in any process."""
    try:
        # SIGIO, which a breaker would send, ends a process; this one is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def worthwhile(directory: Path) -> bool:
    """Say whether the file system that holds ``directory`` profits from recycling."""
    try:
        return file_system_of(directory) in FILE_SYSTEMS
    except OSError:
        return False


def _may_be_spare(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1
