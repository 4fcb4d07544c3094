"""What the deltas of a run's head are made of, and what of it is not on this disk. Reads only.

Who must have it? An origin, all: the head is written after what it names, and nobody can fetch it
again. A relay fetches it on demand. A worker keeps none (docs/adr/0017).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from shardcast.errors import NotFoundError
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import DeltaRef, Head, OpenDeltaRef, decode_head
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.store.files import disk_errors
from shardcast.store.run import RunStore


@dataclass(frozen=True, slots=True)
class Lacking:
    """A delta of which something is not here.

    Attributes:
        version: What it leads to.
        base: The version that it starts from, None for a compressed copy.
        blobs: Digest of each delta part and blob that is not here, with its size where that is known.
    """

    version: int
    base: int | None
    blobs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Name the delta."""
        what = "compressed copy" if self.base is None else f"delta from version {self.base}"
        return f"the {what} of version {self.version}"


def lacking_deltas(run: RunStore, version: int | None, damaged: Collection[str]) -> list[Lacking]:
    """Return the deltas that the stored head announces and that are not whole here.

    A publisher may replace the head at any moment and remove what only the old one named: what was
    found is of a head that was in place before and after.

    Args:
        run: The run's directory.
        version: Only those that lead to it; None: all.
        damaged: Digests of what is here and wrong: it is not looked into.

    Raises:
        MalformedError: If the head or a part is none.
        DiskError: If something cannot be read.
    """
    data = run.read_head()
    while True:
        head = None if data is None else decode_head(open_unverified(data)[1])
        found = [] if head is None else list(_lacking(run, head, version, damaged))
        again = run.read_head()
        if not found or again == data:
            return found
        data = again


def _lacking(
    run: RunStore, head: Head, version: int | None, damaged: Collection[str]
) -> Iterator[Lacking]:
    for number, delta in _announced(head):
        if version is None or number == version:
            blobs = tuple(_missing(run, delta, damaged))
            if blobs:
                yield Lacking(number, delta.base_version, blobs)


def _announced(head: Head) -> Iterator[tuple[int, DeltaRef | OpenDeltaRef]]:
    for ref in head.versions:
        for delta in ref.deltas:
            yield ref.version, delta
    if head.open is not None:
        for part in head.open.deltas:
            yield head.open.version, part


def _missing(
    run: RunStore, delta: DeltaRef | OpenDeltaRef, damaged: Collection[str]
) -> Iterator[tuple[str, int]]:
    for digest in delta.parts:
        if digest in damaged:
            continue
        try:
            data = _read(run, digest)
        except NotFoundError:
            yield digest, 0
            continue
        for blob in decode_delta_part(data).blobs:
            if not run.has_blob(blob.digest):
                yield blob.digest, blob.bytes


def _read(run: RunStore, digest: str) -> bytes:
    """Return a document as it lies there; ``RunStore.read_blob`` would remove a damaged one.

    Raises:
        NotFoundError: If it is not here.
    """
    path = run.blob_path(digest)
    with disk_errors(path, "reading"):
        try:
            with open(path, "rb") as file:
                return file.read(MAX_DOCUMENT_BYTES + 1)
        except FileNotFoundError:
            raise NotFoundError(f"no document {digest}", source=str(path)) from None
