"""What every fault test asserts: the five pass criteria, as one context.

a. No wrong byte is ever visible under a final name (``watch``, ``served``).
b. The error is explicit and names the source (``named``).
c. Other workers are not affected (``unaffected``).
d. At most one shard a failed connection is fetched again, hedges counted apart (``fetched``).
e. Recovery needs no operator: the same process gets the version (``recovered``).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from shardcast.events import WorkerEvent
from shardcast.protocol.digest import digest_of
from tests.fakes import KIB, FakeRun

CRITERIA: Final = "abcde"
SHARD: Final = 256 * KIB
_LOOK_S: Final = 0.005
_PIECE: Final = 1 << 20

Truth = Callable[[int], Mapping[str, str] | None]
"""The digest of each file of a version, by path; None for a version that nobody published."""

Digester = Callable[[Path], str]
"""Hashes a file of a version; another one than BLAKE3 where files are too large for that."""


def published(run: FakeRun) -> Truth:
    """What a run in memory published, also later than now."""
    known: dict[int, dict[str, str]] = {}

    def truth(version: int) -> Mapping[str, str] | None:
        if version not in run.files:
            return None
        if version not in known:
            known[version] = {path: digest_of(data) for path, data in run.files[version].items()}
        return known[version]

    return truth


def digest_of_file(path: Path) -> str:
    """BLAKE3 of a file's bytes."""
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest()


def directories(versions: Mapping[int, Path], digest: Digester = digest_of_file) -> Truth:
    """What real directories were published as; more may be added to the mapping."""
    known: dict[int, dict[str, str]] = {}

    def truth(version: int) -> Mapping[str, str] | None:
        if version not in versions:
            return None
        if version not in known:
            root = versions[version]
            known[version] = {name: digest(root / name) for name in _files(root)}
        return known[version]

    return truth


def _files(root: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(directory, name), root)
        for directory, _, names in os.walk(root)
        for name in names
    )


def reports(events: Iterable[WorkerEvent]) -> list[str]:
    """What a worker told about errors, a line each: code, source, message."""
    return [
        f"{event.kind}: {event.error.code}: {event.source or event.error.source}: {event.error}"
        for event in events
        if event.error is not None
    ]


class _Watch:
    """Looks at the final names of worker directories and relay stores, again and again.

    What has not changed since it was found right (inode, size, mtime) is not hashed again, apart
    from the last look.
    """

    def __init__(self, truth: Truth, digest: Digester) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self.roots: list[Path] = []
        self._truth = truth
        self._digest = digest
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._all()

    def stop(self) -> None:
        """Look a last time, at everything."""
        self._stop.set()
        self._thread.join()
        self._seen.clear()
        self._all()

    def _all(self) -> None:
        for root in list(self.roots):
            self._look(root)
        self.looks += 1

    def _look(self, root: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(root / "versions")):
                self._version(Path(entry.path))
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(root / "blobs")):
                if entry.name.endswith(".bin") and not entry.name.startswith("."):
                    name = entry.name.removesuffix(".bin")
                    self._file(Path(entry.path), name, digest_of_file)
        self._current(root)

    def _version(self, directory: Path) -> None:
        inode = os.stat(directory).st_ino
        truth = self._truth(int(directory.name))
        found: list[str] = []
        if truth is None:
            self._wrong(f"{directory} is a version that nobody published", directory, inode)
            return
        found = _files(directory)
        if found != sorted(truth):
            what = f"{directory} has files {found} instead of {sorted(truth)}"
            self._wrong(what, directory, inode)
            return
        for name, digest in truth.items():
            try:
                self._file(directory / name, digest, self._digest)
            except FileNotFoundError:
                self._wrong(f"{directory / name} went while it had its name", directory, inode)

    def _wrong(self, what: str, directory: Path, inode: int) -> None:
        """Note a problem, unless the directory itself has just lost its name (eviction)."""
        with suppress(FileNotFoundError):
            if os.stat(directory).st_ino == inode and what not in self.problems:
                self.problems.append(what)

    def _file(self, path: Path, digest: str, digester: Digester) -> None:
        info = os.stat(path)
        signature = info.st_ino, info.st_size, info.st_mtime_ns
        if self._seen.get(path) == signature:
            return
        found = digester(path)
        if found != digest:
            self.problems.append(f"{path} holds {info.st_size} bytes {found}, not {digest}")
        self._seen[path] = signature

    def _current(self, root: Path) -> None:
        with suppress(FileNotFoundError, OSError):
            target = os.readlink(root / "current")
            there = (root / target).is_dir()
            if not there and os.readlink(root / "current") == target:
                self.problems.append(f"{root / 'current'} names {target}, which is not there")


class Verdict:
    """Collects what a case shows. Made by ``criteria``."""

    def __init__(self, truth: Truth, digest: Digester = digest_of_file) -> None:
        self._truth = truth
        self._digest = digest
        self._watch = _Watch(truth, digest)
        self._judged: set[str] = set()
        self._served = 0

    # --- a ------------------------------------------------------------------------------------

    def watch(self, *run_directories: Path) -> None:
        """Watch a worker's directory or a relay's ``store/RUN``, now or before it exists."""
        self._watch.roots += run_directories

    def served(self, digest: str, body: bytes) -> None:
        """A reader got a complete blob: it must be the right one."""
        assert digest_of(body) == digest, f"a wrong blob was served as {digest}"
        self._served += 1

    # --- b ------------------------------------------------------------------------------------

    def named(self, told: Iterable[str], source: str, says: str = "") -> None:
        """Some report (event, log line, stderr) names the source and says what it did (regex)."""
        lines = list(told)
        found = [line for line in lines if source in line and re.search(says, line)]
        assert found, f"nobody said {says!r} of {source}: {lines}"
        self._judged.add("b")

    # --- c ------------------------------------------------------------------------------------

    def unaffected(
        self, out: Path, truth: Truth, version: int, told: Iterable[str] = (), extra: int = 0
    ) -> None:
        """A bystander has everything, heard of no error, and fetched nothing twice (``extra``)."""
        assert_version(out, truth, version)
        heard = list(told)
        assert not heard, f"a bystander was troubled: {heard}"
        assert extra == 0, f"a bystander fetched {extra} bytes more than there are"
        self._judged.add("c")

    # --- d ------------------------------------------------------------------------------------

    def fetched(
        self, received: int, needed: int, *, failures: int, hedged: int = 0, unit: int = SHARD
    ) -> int:
        """Return how many bytes came again: at most one ``unit`` for each failed connection.

        Args:
            received: Bytes that the sources sent.
            needed: Size of what was missing, each blob once.
            failures: Connections that failed, or were given up.
            hedged: Bytes asked for twice on purpose.
            unit: A shard, or a frame.
        """
        again = received - needed - hedged
        assert received >= needed, f"{received} bytes came, of {needed}: who sent the others?"
        assert again <= failures * unit, f"{again} bytes again after {failures} failed connections"
        self._judged.add("d")
        return again

    # --- e ------------------------------------------------------------------------------------

    def recovered(self, out: Path, version: int) -> None:
        """The same process has got the version."""
        assert_version(out, self._truth, version, self._digest)
        self._judged.add("e")

    def waive(self, criterion: str, why: str) -> None:
        """Say why a criterion does not apply to a case."""
        assert criterion in CRITERIA
        assert why
        self._judged.add(criterion)

    def _close(self) -> None:
        self._watch.stop()
        assert not self._watch.problems, f"visible: {self._watch.problems}"
        assert self._watch.roots or self._served, "nothing was watched (criterion a)"
        missing = set(CRITERIA) - {"a"} - self._judged
        assert not missing, f"criteria not judged: {sorted(missing)}"


def assert_version(
    out: Path, truth: Truth, version: int, digest: Digester = digest_of_file
) -> None:
    """``current`` names the version, and its files are the published ones."""
    directory = (out / "current").resolve(strict=True)
    assert int(directory.name) == version, f"current is {directory}, not version {version}"
    expected = truth(version)
    assert expected is not None
    found = {name: digest(directory / name) for name in _files(directory)}
    assert found == expected, f"{directory} holds {found} instead of {expected}"


@contextmanager
def criteria(truth: Truth, digest: Digester = digest_of_file) -> Iterator[Verdict]:
    """Watch while the block runs; at its end each criterion was judged, or the test fails."""
    verdict = Verdict(truth, digest)
    verdict._watch.start()
    try:
        yield verdict
    except BaseException:
        verdict._watch.stop()
        raise
    verdict._close()
