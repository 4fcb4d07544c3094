"""A reader that knows nothing of Shardcast: `python -m tests.faults.outside_reader DIRECTORY`.

It opens a version in every way that engines and people do, says "ready" in JSON, and for each line
on stdin reads all of it again and prints the digests: of what it opened, not of what has the name
now. A mapping whose file was cut would end it with SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import safe_open

PIECE = 100_000


def mapped(path: Path) -> Callable[[], bytes]:
    """A mapping that outlives its descriptor."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return lambda: pages[:]


def opened(path: Path) -> Callable[[], bytes]:
    """An open file, read in pieces from where it stands: `tail -f` begun anew."""
    file = path.open("rb", buffering=0)

    def read() -> bytes:
        file.seek(0)
        return b"".join(iter(lambda: file.read(PIECE), b""))

    return read


def through_directory(path: Path) -> Callable[[], bytes]:
    """A descriptor of the directory, the file opened through it at once, and again later.

    Later the name may be gone; a name that is still there leads to the same bytes.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    kept = opened(path)

    def read() -> bytes:
        data = kept()
        try:
            fd = os.open(path.name, os.O_RDONLY, dir_fd=directory)
        except FileNotFoundError:
            return data
        with open(fd, "rb") as file:
            again = file.read()
        return data if again == data else again

    return read


def tensors(path: Path) -> Callable[[], bytes]:
    """safetensors on the CPU: the file is mapped, tensors are views or copies of it."""
    file: Any = safe_open(path, framework="numpy")
    return lambda: b"".join(file.get_tensor(name).tobytes() for name in sorted(file.keys()))


WAYS: dict[str, Callable[[Path], Callable[[], bytes]]] = {
    "model.safetensors": tensors,
    "mapped.bin": mapped,
    "opened.bin": opened,
    "directory.bin": through_directory,
}


def main() -> None:
    """Open, then read for each line of stdin."""
    root = Path(sys.argv[1])
    readers = {name: way(root / name) for name, way in WAYS.items()}
    print(json.dumps({"event": "ready"}), flush=True)
    for _line in sys.stdin:
        digests = {name: blake3(read()).hexdigest() for name, read in readers.items()}
        print(json.dumps({"event": "read", **digests}), flush=True)


if __name__ == "__main__":
    main()
