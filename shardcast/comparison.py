"""Two checkpoint directories compared as a publication would: tensor by tensor, frame by frame.

Nothing is published or written. All cores work, each on one frame: in memory are a few times 16 MiB
a core, whatever the checkpoints' size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardcast.codec.encode import encode_frame
from shardcast.delta_making import tensors_of
from shardcast.deltas import Tensors, frame_runs
from shardcast.errors import MalformedError, ModifiedError
from shardcast.hashing import default_threads
from shardcast.protocol.layout import FileEntry, Layout, choose_shard_bytes
from shardcast.sharing import Stopping, share_out
from shardcast.sources import SourceFile, select_files
from shardcast.store.files import disk_errors, read_into
from shardcast.tensor_changes import Changes, Tally

Progress = Callable[[int], None]
"""Called with bytes that were compared since the last call, from several threads."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two directories.

    Attributes:
        changes: What changed, tensor by tensor.
        base_bytes: Size of the files of the first.
        bytes: Size of the files of the second.
        removed: Files of the first that the second has not.
    """

    changes: Changes
    base_bytes: int
    bytes: int
    removed: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than the second directory has."""
        return self.bytes / max(self.changes.wire_bytes, 1)


def compare_directories(
    base: Path,
    target: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    threads: int | None = None,
    begin: Callable[[int], None] = lambda total: None,
    progress: Progress = lambda count: None,
) -> Comparison:
    """Compare the files that ``publish`` would take of two directories.

    Args:
        base: The old one.
        target: The new one.
        include: As of ``publish``.
        exclude: As of ``publish``.
        threads: How many; None: one a core.
        begin: Told how many bytes there are to compare.
        progress: Told how many were.

    Raises:
        UsageError: If one is no directory, or nothing of it is to be published.
        MalformedError: If a path in it could not be published.
        ModifiedError: If a file shrinks meanwhile.
        DiskError: If something cannot be read.
    """
    old, new = (_Directory(path, include, exclude) for path in (base, target))
    begin(new.layout.total_bytes)
    tally = Tally(new.tensors, old.tensors)

    def work(_tool: None, run: range, stopping: Stopping) -> None:
        if stopping():
            return
        data = memoryview(new.shards(run))
        frame: bytes | None = encode_frame(data, tally.map.pieces(run), old)
        if frame is not None and len(frame) >= len(data):
            frame = None
        tally.add(run, data, frame, old)
        progress(len(data))

    runs = frame_runs(new.layout)
    share_out(
        runs,
        work,
        threads=max(1, min(threads or default_threads(), len(runs))),
        tool=contextlib.nullcontext,
        name="compare",
    )
    kept = {entry.path for entry in new.layout.files}
    return Comparison(
        changes=tally.changes(),
        base_bytes=old.layout.total_bytes,
        bytes=new.layout.total_bytes,
        removed=tuple(e.path for e in old.layout.files if e.path not in kept),
    )


class _Directory:
    """A checkpoint directory, as a version would be made of it."""

    def __init__(self, root: Path, include: Iterable[str], exclude: Iterable[str]) -> None:
        selection = select_files(root, include=tuple(include), exclude=tuple(exclude))
        self._files: list[SourceFile] = list(selection.files)
        self.layout = Layout(
            run="diff",
            version=1,
            step=None,
            lineage="diff",
            created_at=0,
            shard_bytes=choose_shard_bytes(selection.total_bytes),
            metadata={},
            files=[FileEntry(path=f.path, bytes=f.stamp.bytes) for f in self._files],
        )
        self.layout.check()
        self.tensors: Tensors = tensors_of(self.layout, lambda file: self._files[file].location)

    def shards(self, run: range) -> bytearray:
        """Return the bytes of consecutive shards."""
        data = bytearray()
        for extent in map(self.layout.extent, run):
            data += self._read(extent.file, extent.offset, extent.length)
        return data

    def range(self, file: int, offset: int, length: int) -> memoryview:
        """Return bytes of file number ``file``."""
        if not 0 <= file < len(self._files) or offset + length > self._files[file].stamp.bytes:
            raise MalformedError(f"file {file} has no byte {offset + length - 1}")
        return memoryview(self._read(file, offset, length))

    def _read(self, file: int, offset: int, length: int) -> bytearray:
        path, data = self._files[file].location, bytearray(length)
        with disk_errors(path, "reading"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                got = read_into(fd, memoryview(data), offset)
            finally:
                os.close(fd)
        if got != length:
            raise ModifiedError(
                f"{path} shrank to {offset + got} bytes while it was read", source=str(path)
            )
        return data
