"""Reads what workers show, all the time, from outside: `python -m loadtest.observer CONFIG`.

A process of its own that knows nothing of the product but its directories. The trainer's side
writes down each checkpoint's SHA-256 digests before it publishes (`truth/SERIAL.json`); each
checkpoint carries its serial in a file. So a directory is right if it has exactly the files of
one checkpoint, with its bytes, and if every worker means the same checkpoint by a version's number.

It reads as consumers should: `current` is resolved once; then either a shared lock on the version's
directory is held while its files are read, or all its files are opened before the first is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.processes import terminate_as_exit

MARKER = "soak.json"
"""The file in each checkpoint that names its serial."""

_SHARE = 0.25  # of one core, at most: what is watched needs the others


def digest_of(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def truth_of(directory: Path) -> dict[str, str]:
    """Return the digest of each file of a checkpoint by its path."""
    return {
        str(path.relative_to(directory)): digest_of(path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@dataclass
class Observer:
    """What was seen so far.

    Attributes:
        workers: `OUT` of each worker by name.
        truth: Directory of the truths.
        flips: File with one path a line: what was damaged on purpose under its final name.
    """

    workers: dict[str, Path]
    truth: Path
    flips: Path
    serials: dict[int, int] = field(default_factory=dict)
    had_current: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    reads: int = 0
    bytes: int = 0
    turned: bool = False

    def tell(self, event: str, **members: object) -> None:
        """Print an event, each only once."""
        line = json.dumps({"event": event, **members})
        if line not in self.told:
            self.told.add(line)
            print(line, flush=True)

    def look(self, name: str) -> None:
        """Read a worker's current version once."""
        out = self.workers[name]
        try:
            version = os.readlink(out / "current")
        except FileNotFoundError:
            if name in self.had_current:
                self.tell("absent", worker=name)
            return
        self.had_current.add(name)
        self.turned = not self.turned
        with contextlib.suppress(EvictedError):
            self.read(name, out / version, locked=self.turned, current=True)

    def read(self, name: str, directory: Path, *, locked: bool, current: bool = False) -> None:
        """Compare a version's directory with the truth.

        Raises:
            EvictedError: It went away before it could be opened: it was current a moment ago.
        """
        with _opened(directory, locked=locked) as files:
            found = {}
            for path, fd in files.items():
                data = _all_of(fd)
                found[path] = digest_of(data)
                self.bytes += len(data)
            marker = _marker(files.get(MARKER))
        self.reads += 1
        where = {"worker": name, "version": int(directory.name), "locked": locked}
        self._compare(where, directory, found, marker)
        if current:
            self.tell("seen", worker=name, version=int(directory.name), serial=marker)

    def _compare(
        self, where: dict[str, object], directory: Path, found: dict[str, str], serial: int | None
    ) -> None:
        try:
            truth = json.loads((self.truth / f"{serial}.json").read_text())
        except FileNotFoundError:
            truth = {}
        wrong = sorted(path for path in {*truth, *found} if truth.get(path) != found.get(path))
        flipped = set(self.flips.read_text().splitlines()) if self.flips.exists() else set()
        for path in wrong:
            ours = str(directory / path) in flipped
            self.tell("flipped" if ours else "wrong", **where, path=path, serial=serial)
        number = int(directory.name)
        if not wrong and serial is not None and self.serials.setdefault(number, serial) != serial:
            self.tell("wrong", **where, path="(another checkpoint)", serial=serial)

    def everything(self, stores: dict[str, Path]) -> None:
        """Read all that lies under a final name, in workers and relays."""
        for name, root in {**self.workers, **stores}.items():
            for directory in sorted((root / "versions").glob("*")):
                with contextlib.suppress(EvictedError):
                    self.read(name, directory, locked=True)
        print(json.dumps({"event": "all", "reads": self.reads, "bytes": self.bytes}), flush=True)


class EvictedError(Exception):
    """The directory is gone, or going."""


@contextlib.contextmanager
def _opened(directory: Path, *, locked: bool) -> Iterator[dict[str, int]]:
    """Open every file of a version, below one open directory."""
    with contextlib.ExitStack() as stack:
        try:
            root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, root)
            if locked:
                fcntl.flock(root, fcntl.LOCK_SH | fcntl.LOCK_NB)
            files = {}
            for base, _directories, names, at in os.fwalk(dir_fd=root):
                for name in names:
                    fd = os.open(name, os.O_RDONLY, dir_fd=at)
                    stack.callback(os.close, fd)
                    files[os.path.normpath(os.path.join(base, name))] = fd
            # A walk that an eviction overtook saw only part of the files.
            if os.fstat(root).st_nlink == 0 or not directory.exists():
                raise EvictedError
        except (FileNotFoundError, BlockingIOError) as error:
            raise EvictedError from error
        yield files


def _all_of(fd: int) -> bytes:
    pieces = []
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _marker(fd: int | None) -> int | None:
    if fd is None:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(os.pread(fd, 4096, 0))["serial"])
    return None


def main() -> None:
    """Look until stdin says `all`, then read everything, and end at the end of stdin."""
    config = json.loads(Path(sys.argv[1]).read_text())
    observer = Observer(
        {name: Path(path) for name, path in config["workers"].items()},
        Path(config["truth"]),
        Path(config["flips"]),
    )
    stores = {name: Path(path) for name, path in config["stores"].items()}
    with terminate_as_exit():
        pause = 0.0
        while True:
            if select.select([sys.stdin], [], [], pause)[0]:
                if sys.stdin.readline().strip() != "all":
                    return
                observer.everything(stores)
            start = time.monotonic()
            for name in observer.workers:
                observer.look(name)
            pause = min(5.0, (time.monotonic() - start) * (1 / _SHARE - 1)) + 0.05


if __name__ == "__main__":
    main()
