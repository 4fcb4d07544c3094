"""Proof that directories hold the same files with the same bytes, by BLAKE3 of every file."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from shardcast.hashing import default_threads
from shardcast.sources import select_files


def compare(source: Path, others: Mapping[str, Path]) -> tuple[int, dict[str, bool]]:
    """Compare what is published of a checkpoint with other directories.

    Returns:
        How many files there are, and for each name whether its directory has exactly them.
    """
    expected = {file.path: file.location for file in select_files(source).files}
    found = {name: files_of(directory) for name, directory in others.items()}
    wanted = set(expected.values())
    wanted |= {path for files in found.values() for path in files.values()}
    with concurrent.futures.ThreadPoolExecutor(default_threads()) as pool:
        order = sorted(wanted)
        digests = dict(zip(order, pool.map(digest_of_file, order), strict=True))
    truth = {path: digests[location] for path, location in expected.items()}
    return len(truth), {
        name: {path: digests[location] for path, location in files.items()} == truth
        for name, files in found.items()
    }


def files_of(directory: Path) -> dict[str, Path]:
    """Return relative path to location of the regular files below a directory."""
    root = Path(os.path.realpath(directory))
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


def digest_of_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file's bytes."""
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()
