"""The documents of a version on this host, and its other small files: read, never waited for.

The manifest's digest names the layout and the parts, and those every byte of every file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from shardcast.errors import IntegrityError, MalformedError, MixAndMatchError, NotFoundError
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import VersionRef
from shardcast.protocol.layout import decode_layout, decode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MIB
from shardcast.protocol.manifest import Version, assemble, decode_manifest
from shardcast.store.files import disk_errors

MAX_JSON_BYTES: Final = 64 * MIB
"""An index of a model with 100,000 tensors has about 10 MB."""

READING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe in a file's place is opened without waiting for a writer, and refused."""


def load_documents(directory: Path, *, run: str, version: int, digest: str) -> Version:
    """Return what the documents of a version say, all of them named by ``digest`` in the end.

    Args:
        directory: The version's directory, committed or staged, in an ``OUT`` or a store's run.
        run: Its run.
        version: Its number.
        digest: Its manifest's digest.

    Raises:
        NotFoundError: If a document is not there.
        IntegrityError: If one is not what its digest says.
        MixAndMatchError, MalformedError: If they are of another version, or malformed.
        DiskError: If the system refuses.
    """
    blobs = _blobs_beside(directory)
    manifest = decode_manifest(_document(blobs, digest, "manifest"))
    layout = decode_layout(_document(blobs, manifest.layout, "layout"))
    if (layout.run, layout.version) != (run, version):
        raise MixAndMatchError(
            f"manifest {digest} is of version {layout.version} of run {layout.run!r}, not of "
            f"version {version} of run {run!r}",
            source=str(directory),
        )
    ref = VersionRef(
        version=version, step=layout.step, manifest=digest, bytes=layout.total_bytes, deltas=[]
    )
    parts = [decode_part(_document(blobs, part, "part")) for part in manifest.parts]
    return assemble(ref, run, manifest, layout, parts)


def _blobs_beside(directory: Path) -> Path:
    """Return ``blobs/`` of the run that ``versions/N`` or ``state/staging/N`` lies in."""
    for above in directory.parents[1:3]:
        if (above / "blobs").is_dir():
            return above / "blobs"
    raise NotFoundError(
        "the documents of this version are not there: it must lie where `shardcast follow` or "
        "`pull` put it (OUT/versions/N, beside OUT/blobs)",
        source=str(directory),
    )


def _document(blobs: Path, digest: str, what: str) -> bytes:
    path = blobs / f"{digest}.bin"
    with disk_errors(path, "reading"):
        try:
            data = read_document(path, MAX_DOCUMENT_BYTES + 1)
        except FileNotFoundError as error:
            raise NotFoundError(f"the {what} {digest} is not there", source=str(path)) from error
    if digest_of(data) != digest:
        raise IntegrityError(f"the {what} {digest} is damaged", source=str(path))
    return data


def read_document(path: Path, most: int) -> bytes:
    """Return a file's bytes, ``most`` of them at most; never waits for a writer.

    Raises:
        OSError: If the system refuses.
        IntegrityError: If it is a pipe or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | READING)) as file:
        refuse_pipes(file.fileno(), path, close=False)
        return file.read(most)


def refuse_pipes(fd: int, path: Path, *, close: bool = True) -> None:
    """Refuse an open file that is none, and close it.

    Raises:
        IntegrityError: If it is a pipe, a device or a directory.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        if close:
            os.close(fd)
        raise IntegrityError(f"{path.name} is no regular file", source=str(path))


def json_object(data: bytes, path: Path) -> dict[str, Any]:
    """Return what a small JSON file says.

    Raises:
        MalformedError: If it is no JSON object, or too long.
    """
    if len(data) > MAX_JSON_BYTES:
        raise MalformedError(f"{path.name} is longer than {MAX_JSON_BYTES} bytes", source=str(path))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{path.name} is no JSON", source=str(path)) from error
    if not isinstance(found, dict):
        raise MalformedError(f"{path.name} is no JSON object", source=str(path))
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a small JSON file that nobody has verified; None if it is not there.

    Raises:
        MalformedError: If it is no JSON object.
        DiskError: If the system refuses.
    """
    with disk_errors(path, "reading"):
        try:
            return json_object(read_document(path, MAX_JSON_BYTES + 1), path)
        except FileNotFoundError:
            return None
