"""The floor under publishing and pulling: a process that hashes files with BLAKE3, nothing else.

`python -m loadtest.hashing DIR --way WAY --threads N` prints one JSON line. The ways differ in
how the bytes reach the hasher and where the threads are; a comparison takes the best of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

_READ_BYTES = 1 << 20


def _mapped(path: Path, threads: int) -> str:
    hasher = blake3(max_threads=threads)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _read(path: Path, threads: int) -> str:
    hasher = blake3(max_threads=threads)
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            hasher.update(view[:count])
    return hasher.hexdigest()


def _one_by_one(digest: Callable[[Path, int], str], paths: list[Path], threads: int) -> list[str]:
    return [digest(path, threads) for path in paths]


def _side_by_side(digest: Callable[[Path, int], str], paths: list[Path], threads: int) -> list[str]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda path: digest(path, 1), paths))


WAYS: dict[str, Callable[[list[Path], int], list[str]]] = {
    "mmap-threads": lambda paths, threads: _one_by_one(_mapped, paths, threads),
    "mmap-files": lambda paths, threads: _side_by_side(_mapped, paths, threads),
    "read-files": lambda paths, threads: _side_by_side(_read, paths, threads),
}


def main() -> None:
    """Hash every file below a directory."""
    parser = argparse.ArgumentParser(description="hash a directory with BLAKE3")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--way", choices=sorted(WAYS), default="read-files")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    paths = sorted(path for path in options.directory.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    start = time.monotonic()
    WAYS[options.way](paths, options.threads)
    seconds = time.monotonic() - start
    print(json.dumps({"event": "hashed", "bytes": total, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
