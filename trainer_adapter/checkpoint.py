"""One committed version on this host, opened to be loaded: leased, verified, held.

A version directory lies in a worker's ``OUT`` (``versions/N``) or a store's run, whose ``blobs/``
hold the documents that the manifest's digest names. From that digest alone everything follows:
which files there are, and what every byte of them must be.

What is *opened* keeps a shared lock on the directory, so nobody evicts or recycles it, and a
descriptor of each file, so it stays the same file whatever happens to its name. What is *verified*
was hashed, shard by shard, and had its pages mapped. ``changed`` then tells by the files' identity
whether the bytes can still be the ones that were hashed: a write, a truncation or another file under
the name all change size, mtime or inode. Not ctime: a file that did not change from one version to the
next is one inode with several names, and each link that a follower makes, or eviction takes away,
moves its ctime. What escapes is a write whose mtime somebody has set back.

Needs no torch but for ``tensors``.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from blake3 import blake3

from shardcast.codec.spans import Tensor, header_bytes, read_tensors
from shardcast.errors import (
    IntegrityError,
    MalformedError,
    NonFiniteError,
    NotFoundError,
    ShardcastError,
)
from shardcast.finite import FORMATS, Place, refuse_places
from shardcast.protocol.limits import MIB
from shardcast.sharing import Stopping, share_out
from shardcast.store.files import disk_errors, read_into
from trainer_adapter.documents import (
    MAX_JSON_BYTES,
    READING,
    json_object,
    load_documents,
    refuse_pipes,
)
from trainer_adapter.leases import leased
from trainer_adapter.specs import DTYPES, NAMES, Spec, layer_order

if TYPE_CHECKING:
    import torch

INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_SMALL: Final = (CONFIG, INDEX, "adapter_config.json")
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14; Python 3.11 has no name for it."""
_POPULATE_BYTES: Final = 64 * MIB
_CHUNK_BYTES: Final = MIB
Progress = Callable[[int], None]
"""Called with the bytes hashed since the last call, from any thread."""


Identity = tuple[int, int, int, int]
"""Device, inode, size, mtime in nanoseconds."""


def _identity(of: os.stat_result) -> Identity:
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns


class StoppedError(ShardcastError):
    """The caller wanted no more of it: another version took its place."""

    code = "stopped"


class _File:
    """An open file of a version: descriptor, identity when it was opened, its mapping."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.identity = _identity(os.fstat(fd))
        self.map: mmap.mmap | None = None

    def reopened(self) -> None:
        """Take it for what it is now."""
        self.identity = _identity(os.fstat(self.fd))
        self.map = None

    def mapped(self) -> mmap.mmap:
        """Return the mapping: private, so that whoever writes to a tensor changes no file."""
        if self.map is None:
            self.map = mmap.mmap(self.fd, self.identity[2], access=mmap.ACCESS_COPY)
        return self.map


class Checkpoint:
    """A version that is opened. Not thread-safe; close it when nothing loads from it any more.

    Attributes:
        version: What its documents say.
        directory: Where it lies.
        verified: Whether ``verify`` ended well.
        specs: Its tensors by name, in the order in which they are loaded; after ``verify``.
    """

    def __init__(self, path: Path, *, run: str, version: int, digest: str) -> None:
        """Open a version directory and lease it.

        Args:
            path: The directory, or a link to it.
            run: Its run.
            version: Its number.
            digest: Its manifest's digest, which decides.

        Raises:
            NotFoundError: If the directory or a document is not there.
            IntegrityError: If a document is not what its digest says.
            MixAndMatchError, MalformedError: If the documents are of something else.
            BusyError: If the version is being evicted.
            DiskError: If the system refuses.
        """
        self.directory = Path(os.path.realpath(path))
        self.verified = False
        self.specs: dict[str, Spec] = {}
        self._files: dict[str, _File] = {}
        self._named = True
        self._lease = leased(self.directory)
        try:
            self.version = load_documents(self.directory, run=run, version=version, digest=digest)
            self._sizes = {entry.path: entry.bytes for entry in self.version.layout.files}
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """Its manifest's digest."""
        return str(self.version.manifest)

    # --- verifying --------------------------------------------------------------------------

    def verify(
        self, progress: Progress = lambda count: None, *, threads: int = 1,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Hash what is to be loaded, read the headers, make the pages resident.

        Args:
            progress: Hears of the bytes that were hashed.
            threads: How many hash.
            stopping: Says when to give up.

        Raises:
            IntegrityError: If a byte is not what the publisher signed; names file and shard.
            NotFoundError: If a file is missing.
            MalformedError: If the files are no checkpoint.
            StoppedError: If ``stopping`` said so.
            DiskError: If the system refuses.
        """
        self.verified = False
        self._forget_files()
        self._named = True
        self._hash([path for path in _SMALL if path in self._sizes], progress, 1, stopping)
        weights = self._weight_files()
        self._hash(weights, progress, threads, stopping)
        self.specs = self._read_headers(weights)
        for path in weights:
            _make_resident(self._files[path], stopping)
        if (reason := self._difference()) is not None:
            raise IntegrityError(f"{reason} while it was verified", source=str(self.directory))
        self.verified = True

    def verify_again(self) -> None:
        """Verify what was verified and has changed since: the open files, or those under the names.

        Files that were deleted, or others put in their place, are still what they were for whoever
        has them open.

        Raises:
            ShardcastError: If neither are what was published.
        """
        self.verified = False
        if not self.specs:  # the last time it broke off: what is open is not all of it
            self.verify()
            return
        try:
            for file in self._files.values():
                file.reopened()
                self._check_size(file)
            self._hash_open(list(self._files), lambda count: None, 1, lambda: False)
        except ShardcastError:
            self.verify()
        else:
            self._named, self.verified = False, True

    @property
    def bytes(self) -> int:
        """How much ``verify`` hashes at most."""
        return sum(
            size
            for path, size in self._sizes.items()
            if path.endswith(".safetensors") or path in _SMALL
        )

    def changed(self) -> str | None:
        """Say why the files cannot be taken for what was verified any more, or None.

        Also those that never were, or no longer are: after a ``verify`` that failed, or ``close``.
        A few microseconds a file; reads nothing.
        """
        if not self.verified:
            return f"version {self.version.number} is not verified"
        return self._difference()

    def require_unchanged(self, what: str) -> None:
        """Refuse what was made of the files, where they changed while it was ``what`` (done).

        Raises:
            IntegrityError: If ``changed`` says so.
        """
        if (reason := self.changed()) is not None:
            raise IntegrityError(f"{reason} while it was {what}", source=str(self.directory))

    def _difference(self) -> str | None:
        for file in self._files.values():
            try:
                now = _identity(os.fstat(file.fd))
                named = _identity(os.stat(self.directory / file.path)) if self._named else now
            except OSError as error:
                return f"{file.path} is gone or unreadable ({error.strerror})"
            if now != file.identity or named != file.identity:
                return f"{file.path} was changed or replaced"
        return None

    def nonfinite(
        self, progress: Progress = lambda count: None, *, threads: int = 1,
        stopping: Callable[[], bool] = lambda: False,
    ) -> str:  # fmt: skip
        """Look for NaN and infinities in what ``verify`` has hashed; about half as dear as that.

        Args:
            progress: Hears of the bytes that were looked at, of ``floats`` in all.
            threads: How many look.
            stopping: Says when to give up.

        Returns:
            Tensor, file, value and place of one of them; empty where all numbers are finite.

        Raises:
            IntegrityError: If it is not verified.
            ModifiedError: If a file was cut off since.
            DiskError: If the system refuses.
        """
        self._require_verified()
        places = [
            Place(
                spec.file,
                self.directory / spec.file,
                Tensor(spec.name, NAMES[spec.dtype], spec.shape, 0, spec.offset, spec.length),
                self._files[spec.file].fd,
            )
            for spec in self.specs.values()
        ]
        try:
            refuse_places(places, threads=threads, looked_at=progress, stopping=stopping)
        except NonFiniteError as error:
            return error.message
        return ""

    @property
    def floats(self) -> int:
        """How many bytes ``nonfinite`` looks at, if all numbers are finite."""
        return sum(spec.length for spec in self.specs.values() if NAMES[spec.dtype] in FORMATS)

    def _hash(
        self, paths: list[str], progress: Progress, threads: int, stopping: Callable[[], bool]
    ) -> None:
        for path in paths:
            self._files[path] = self._open(path)
        self._hash_open(paths, progress, threads, stopping)

    def _hash_open(
        self, paths: list[str], progress: Progress, threads: int, stopping: Callable[[], bool]
    ) -> None:
        shards = [
            shard
            for number, entry in enumerate(self.version.layout.files)
            if entry.path in paths
            for shard in self.version.layout.file_shards(number)
        ]

        def work(buffer: memoryview, shard: int, others: Stopping) -> None:
            self._hash_shard(buffer, shard, progress, lambda: others() or stopping())
            if stopping():
                raise StoppedError("given up for another version", source=str(self.directory))

        share_out(
            shards,
            work,
            threads=max(1, min(threads, len(shards))),
            tool=lambda: contextlib.nullcontext(memoryview(bytearray(_CHUNK_BYTES))),
            name="shardcast-verify",
        )

    def _hash_shard(
        self, buffer: memoryview, shard: int, progress: Progress, stopping: Stopping
    ) -> None:
        """Hash one shard with ``pread``: a file that shrinks meanwhile is an error, not a signal."""
        extent = self.version.layout.extent(shard)
        hasher, done = blake3(), 0
        with disk_errors(self.directory / extent.path, "reading"):
            while done < extent.length:
                if stopping():
                    return
                piece = buffer[: min(len(buffer), extent.length - done)]
                got = read_into(self._files[extent.path].fd, piece, extent.offset + done)
                if got != len(piece):
                    break
                hasher.update(piece)
                done += got
                progress(got)
        if done != extent.length or hasher.hexdigest() != self.version.digests[shard]:
            raise IntegrityError(
                f"version {self.version.number}, {extent.path}, shard {shard} (bytes "
                f"{extent.offset} to {extent.offset + extent.length - 1}) is not what was "
                "published: `shardcast follow --engine` repairs that; without it stop the follower and "
                "`shardcast pull`, which fetches it again",
                source=str(self.directory),
            )

    def _open(self, path: str) -> _File:
        where = self.directory / path
        try:
            fd = os.open(where, READING | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(
                f"version {self.version.number} lacks the file {path}", source=str(where)
            ) from error
        except OSError as error:
            with disk_errors(where, "opening"):
                raise error
        refuse_pipes(fd, where)
        file = _File(path, fd)
        try:
            self._check_size(file)
        except IntegrityError:
            os.close(fd)
            raise
        return file

    def _check_size(self, file: _File) -> None:
        size, wanted = file.identity[2], self._sizes[file.path]
        if size != wanted:
            raise IntegrityError(
                f"{file.path} has {size} bytes instead of {wanted}",
                source=str(self.directory / file.path),
            )

    # --- tensors ----------------------------------------------------------------------------

    def json(self, path: str) -> dict[str, Any] | None:
        """Return a small JSON file that ``verify`` has hashed; None if the version has none.

        Raises:
            MalformedError: If it is no JSON object.
            DiskError: If the system refuses.
        """
        file = self._files.get(path)
        if file is None:
            return None
        with disk_errors(self.directory / path, "reading"):
            data = os.pread(file.fd, min(file.identity[2], MAX_JSON_BYTES + 1), 0)
        return json_object(data, self.directory / path)

    def _weight_files(self) -> list[str]:
        """Return the files that hold the model: those of the index, else all safetensors on top."""
        index = self.json(INDEX)
        if index is None:
            found = sorted(p for p in self._sizes if p.endswith(".safetensors") and "/" not in p)
        else:
            named = index.get("weight_map")
            if not isinstance(named, dict):
                raise MalformedError(f"{INDEX} has no weight_map", source=str(self.directory))
            found = sorted({str(path) for path in named.values()})
        for path in found:
            if path not in self._sizes:
                raise MalformedError(
                    f"{INDEX} names {path[:200]!r}, which the version does not have",
                    source=str(self.directory),
                )
        if not found:
            raise MalformedError(
                f"version {self.version.number} has no .safetensors file",
                source=str(self.directory),
            )
        return found

    def _read_headers(self, paths: list[str]) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        for path in paths:
            for tensor in self._tensors_of(path):
                if tensor.name in specs:
                    raise MalformedError(
                        f"{path} and {specs[tensor.name].file} both have {tensor.name}",
                        source=str(self.directory),
                    )
                specs[tensor.name] = self._spec(path, tensor)
        return {name: specs[name] for name in sorted(specs, key=layer_order)}

    def _tensors_of(self, path: str) -> list[Tensor]:
        file = self._files[path]
        with disk_errors(self.directory / path, "reading"):
            length = header_bytes(os.pread(file.fd, 8, 0))
            header = b"" if length is None else os.pread(file.fd, length, 0)
        tensors = read_tensors(header, 0, file.identity[2]) if header else []
        if not tensors:
            raise MalformedError(f"{path} is no safetensors file", source=str(self.directory))
        return tensors

    def _spec(self, path: str, tensor: Tensor) -> Spec:
        known = DTYPES.get(tensor.dtype)
        if known is None or math.prod(tensor.shape) * known[1] != tensor.length:
            raise MalformedError(
                f"{path}: {tensor.name} is {tensor.length} bytes of {tensor.dtype[:20]} in shape "
                f"{list(tensor.shape)}, which does not fit together or is not known",
                source=str(self.directory),
            )
        return Spec(tensor.name, known[0], tensor.shape, path, tensor.offset, tensor.length)

    def tensors(self, *, copied: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in layer order, each a view of the mapped file: nothing is copied.

        They stay good until they are let go, whatever becomes of this object. Whoever writes into
        one changes neither the file nor what the next call yields.

        Args:
            copied: Read each into memory of its own instead, so that a file that shrinks meanwhile
                is an error and not a signal.

        Raises:
            IntegrityError: If it is not verified, or a file has shrunk (``copied``).
            DiskError: If the system refuses.
        """
        self._require_verified()
        import torch

        for spec in self.specs.values():
            dtype = getattr(torch, spec.dtype)
            if spec.length == 0:
                yield spec.name, torch.empty(spec.shape, dtype=dtype)
                continue
            if copied:
                tensor = torch.empty(spec.length, dtype=torch.uint8)
                self._read(spec, memoryview(tensor.numpy()))
                yield spec.name, tensor.view(dtype).reshape(spec.shape)
                continue
            view = memoryview(self._files[spec.file].mapped())[
                spec.offset : spec.offset + spec.length
            ]
            width = spec.length // math.prod(spec.shape)
            source = view if spec.offset % width == 0 else bytearray(view)
            yield spec.name, torch.frombuffer(source, dtype=dtype).reshape(spec.shape)

    def _require_verified(self) -> None:
        """Refuse to hand out tensors of nothing: unverified it may know none, and that is no model."""
        if not self.verified:
            raise IntegrityError(
                f"version {self.version.number} is not verified: nothing is loaded from it",
                source=str(self.directory),
            )

    def _read(self, spec: Spec, into: memoryview) -> None:
        with disk_errors(self.directory / spec.file, "reading"):
            got = read_into(self._files[spec.file].fd, into, spec.offset)
        if got != spec.length:
            raise IntegrityError(
                f"{spec.file} was cut off while {spec.name} was read", source=str(self.directory)
            )

    def maps(self, address: int) -> bool:
        """Say whether memory is of a mapped file: what is written to the file may show there."""
        for file in self._files.values():
            if file.map is not None:
                start = ctypes.addressof(ctypes.c_char.from_buffer(file.map))
                if start <= address < start + len(file.map):
                    return True
        return False

    def let_pages_go(self) -> None:
        """Take the mapped pages out of this process's memory; the system may keep them."""
        for file in self._files.values():
            if file.map is not None:
                file.map.madvise(mmap.MADV_DONTNEED)

    def map_again(self) -> None:
        """Let the next ``tensors`` start from the files, whatever was written into earlier ones."""
        for file in self._files.values():
            file.map = None

    # --- its end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Give the lease and the descriptors back; tensors that are in use stay good."""
        self.verified = False
        self._forget_files()
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1

    def _forget_files(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        self.specs = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _make_resident(file: _File, stopping: Callable[[], bool]) -> None:
    """Have the kernel map all pages now, so that loading waits for none.

    Where it cannot (before Linux 5.14) the pages are in the page cache at least, since they were
    hashed; a file that shrank is found out by its identity.

    Raises:
        StoppedError: If ``stopping``, which is asked before each piece, said so.
    """
    size = file.identity[2]
    with contextlib.suppress(OSError):
        for start in range(0, size, _POPULATE_BYTES):  # each call keeps all other threads waiting
            if stopping():
                raise StoppedError("given up for another version", source=file.path)
            file.mapped().madvise(_POPULATE_READ, start, min(_POPULATE_BYTES, size - start))
