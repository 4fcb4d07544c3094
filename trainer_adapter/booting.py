"""Which version lies at a path of a worker's ``OUT``: what ``current`` names, or a digest.

Trusts what ``shardcast follow`` and ``pull`` wrote down when they verified it (``state/N.json``);
whoever loads it verifies the bytes again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardcast.errors import MalformedError, NotFoundError
from shardcast.protocol.documents import decode
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.store.files import disk_errors, names_in
from shardcast.store.records import StoredState
from trainer_adapter.documents import load_documents, read_document


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A committed version on this host; ``manifest`` is its identity."""

    run: str
    number: int
    manifest: str
    step: int | None
    directory: Path


def version_at(path: Path) -> FoundVersion:
    """Return the version that a path leads to: ``OUT/current``, or ``OUT/versions/N``.

    Raises:
        NotFoundError: If it is no version that Shardcast keeps.
        MalformedError, IntegrityError: If what describes it is damaged.
        DiskError: If the system refuses.
    """
    directory = Path(os.path.realpath(path))
    root = directory.parent.parent
    if directory.parent.name != "versions" or not directory.name.isdigit():
        raise NotFoundError(
            f"{path} is no version that `shardcast follow` or `pull` keeps: give OUT/current",
            source=str(directory),
        )
    return _described(root, int(directory.name))


def find_version(path: Path, manifest: str) -> FoundVersion:
    """Return the version with a manifest, from the same ``OUT`` that a path leads into.

    Raises:
        NotFoundError: If it is not there.
        MalformedError, IntegrityError, DiskError: As ``version_at``.
    """
    root = Path(os.path.realpath(path)).parent.parent
    for name in sorted(names_in(root / "versions"), reverse=True):
        if name.isdigit() and _state(root, int(name)).manifest == manifest:
            return _described(root, int(name))
    raise NotFoundError(
        f"no version with manifest {manifest} is there (any more): start the engine again, or name "
        "one that is",
        source=str(root),
    )


def _described(root: Path, number: int) -> FoundVersion:
    state = _state(root, number)
    if state.manifest is None:
        raise NotFoundError(f"version {number} is not complete", source=str(root))
    directory = root / "versions" / f"{number:06d}"
    version = load_documents(directory, run=state.run, version=number, digest=state.manifest)
    return FoundVersion(state.run, number, state.manifest, version.layout.step, directory)


def _state(root: Path, number: int) -> StoredState:
    path = root / "state" / f"{number:06d}.json"
    with disk_errors(path, "reading"):
        try:
            data = read_document(path, MAX_DOCUMENT_BYTES + 1)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"nothing says what version {number} is", source=str(path)
            ) from error
    state = decode(data, StoredState, limit=MAX_DOCUMENT_BYTES, what=str(path))
    if state.version != number:
        raise MalformedError(f"it describes version {state.version}", source=str(path))
    return state
