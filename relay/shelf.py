"""Documents and delta blobs on disk: verified once per process, then served as they lie there."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from blake3 import blake3

from shardcast.store.files import COPY_CHUNK_BYTES, disk_errors, read_into
from shardcast.store.run import RunStore

log = logging.getLogger("relay.shelf")

_Stamp = tuple[int, int, int]


class Shelf:
    """The ``blobs/`` of one run. Thread-safe; everything blocks, if only for a moment."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._verified: dict[str, _Stamp] = {}

    def open(self, digest: str) -> tuple[int, int] | None:
        """Open a blob that is good on disk now: its descriptor (the caller closes it) and size.

        The first time, and whenever the file has changed, it is hashed; what is not good is
        removed, so that it will be fetched again.
        """
        found = self._open(digest)
        return found if isinstance(found, tuple) else None

    def open_now(self, digest: str) -> tuple[int, int] | None:
        """Open a blob that was verified and is as it was then; its bytes are not read."""
        stamp = self._verified.get(digest)
        if stamp is None:
            return None
        try:
            fd = self._descriptor(digest)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if _stamp(fd) == stamp:
                return fd, stamp[0]
        os.close(fd)
        return None

    def _descriptor(self, digest: str) -> int:
        try:
            path = self._store.blob_path(digest)
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # whoever removed it did not tell
            self._forget(digest)
            raise

    def _open(self, digest: str) -> tuple[int, int] | bool:
        """Return a good blob's descriptor and size, or whether it was found bad, and removed."""
        try:
            fd = self._descriptor(digest)
        except OSError:
            return False
        try:
            if self._good(fd, digest):
                return fd, os.fstat(fd).st_size
        except OSError as error:  # it says nothing about the bytes: the blob stays
            log.warning("blob %s cannot be read: %s", digest, error)
            os.close(fd)
            return False
        os.close(fd)
        self._store.remove_blob(digest)
        return True

    def look_again(self, digest: str) -> int | None:
        """Hash a blob that is here, whatever was known of it; what is not good is removed.

        Returns:
            Its bytes, 0 if it is not here (any more), None if it was not good.
        """
        self._forget(digest)
        found = self._open(digest)
        if isinstance(found, tuple):
            os.close(found[0])
            return found[1]
        return None if found else 0

    @property
    def verified(self) -> frozenset[str]:
        """The blobs that were verified in this process (some may have been removed since)."""
        with self._lock:
            return frozenset(self._verified)

    def holds(self, digest: str) -> bool:
        """Say whether a blob is good on disk now."""
        opened = self.open(digest)
        if opened is None:
            return False
        os.close(opened[0])
        return True

    def keep(self, digest: str, temporary: os.PathLike[str], fd: int) -> None:
        """Move a verified file to its place.

        It is not synced: after a power cut it is hashed before it is used, and fetched again.

        Raises:
            DiskError: If the system refuses.
        """
        path = self._store.blob_path(digest)
        with disk_errors(path, "keeping"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, path)
            stamp = _stamp(fd)
        with self._lock:
            self._verified[digest] = stamp

    def prune(self) -> None:
        """Forget what was known of blobs that are not here any more.

        Raises:
            DiskError: If the system does not say what is here.
        """
        with self._lock:
            known = set(self._verified)  # what comes while the names are read is left alone
        for digest in known.difference(self._store.blobs()):
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._verified.pop(digest, None)

    def _good(self, fd: int, digest: str) -> bool:
        stamp = _stamp(fd)
        if self._verified.get(digest) == stamp:
            return True
        hasher, done = blake3(), 0
        buffer = memoryview(bytearray(min(COPY_CHUNK_BYTES, stamp[0] or 1)))
        while done < stamp[0]:
            got = read_into(fd, buffer[: min(len(buffer), stamp[0] - done)], done)
            if not got:
                break
            hasher.update(buffer[:got])
            done += got
        if hasher.hexdigest() != digest:
            log.warning("blob %s was damaged on disk; it is removed and fetched again", digest)
            return False
        with self._lock:
            self._verified[digest] = stamp
        return True


def _stamp(fd: int) -> _Stamp:
    stat = os.fstat(fd)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def remove_quietly(path: os.PathLike[str]) -> None:
    """Remove a temporary file; what is gone already is fine."""
    with contextlib.suppress(OSError):
        os.unlink(path)
