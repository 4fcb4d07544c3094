"""What a run's directory remembers in small files: head, trust, documents, what each version is.

Where they lie stands in ``shardcast.store.run``, which adds the versions themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from shardcast.errors import IntegrityError, MalformedError, StateError
from shardcast.protocol import manifest as manifests
from shardcast.protocol import trust
from shardcast.protocol.digest import digest_of, is_digest
from shardcast.protocol.documents import Digest, Document, Positive, check_run, decode, encode
from shardcast.protocol.head import Head, OpenRef, VersionRef
from shardcast.protocol.layout import decode_layout, decode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_PARTS, MAX_HEAD_BYTES
from shardcast.protocol.manifest import Version
from shardcast.store.files import atomic_write, disk_errors, fsync_directory, is_there, names_in

STORED_FORMAT: Final = "shardcast.stored/1"
_unique = itertools.count()


class StoredState(Document, frozen=True, kw_only=True):
    """Which documents describe a version on disk; they lie in ``blobs/``."""

    format: Literal["shardcast.stored/1"] = STORED_FORMAT
    run: str
    version: Positive
    layout: Digest
    manifest: Digest | None
    parts: Annotated[list[Digest], msgspec.Meta(max_length=MAX_DOCUMENT_PARTS)]


class RunRecords:
    """The small files of one run's directory. Thread-safe; nothing is created before a write.

    Attributes:
        root: The directory.
        run: The run's name.
    """

    def __init__(self, root: Path, run: str) -> None:
        self.root = root
        self.run = check_run(run)

    # --- head and trust ---------------------------------------------------------------------

    def read_head(self) -> bytes | None:
        """Return the stored head envelope, or None."""
        return _read(self.root / "head.json", MAX_HEAD_BYTES)

    def write_head(self, envelope: bytes) -> None:
        """Replace the stored head: the commit point of a publication."""
        atomic_write(self.root / "head.json", envelope)

    def head_stamp(self) -> tuple[int, int, int] | None:
        """Return something cheap that changes whenever the head does; None without a head."""
        try:
            found = os.stat(self.root / "head.json")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def read_trust(self) -> trust.TrustState | None:
        """Return what is trusted and was last seen, or None.

        Raises:
            StateError: If it is damaged. Forgetting it would accept a rollback, so a person
                must decide.
        """
        path = self.root / "state" / "trust.json"
        data = _read(path, MAX_DOCUMENT_BYTES)
        if data is None:
            return None
        try:
            state = trust.decode_state(data)
        except MalformedError as error:
            raise StateError(
                f"remembered trust is damaged ({error.message}); remove the file to start anew "
                "with --pubkey, after checking the publisher's head",
                source=str(path),
            ) from error
        if state.run != self.run:
            raise StateError(f"this directory belongs to run {state.run!r}", source=str(self.root))
        return state

    def write_trust(self, state: trust.TrustState) -> None:
        """Remember ``state`` durably; call it before acting on the head it came from."""
        atomic_write(self.root / "state" / "trust.json", trust.encode_state(state))

    def note_numbers(self, state: trust.TrustState, head: Head) -> None:
        """Remember durably the numbers that a head is the first to name, before anybody can read it.

        A new head can be read before it is durable, and may be lost with the power: its numbers are
        taken all the same, since readers know what they stand for.

        Args:
            state: What is remembered here.
            head: The head that is about to be announced.

        Raises:
            DiskError: If the system refuses; the head must not be announced then.
        """
        noted = trust.with_numbers(state, head)
        if {*noted.manifests, *noted.layouts} - {*state.manifests, *state.layouts}:
            self.write_trust(noted)

    # --- documents and delta blobs ----------------------------------------------------------

    def blob_path(self, digest: str) -> Path:
        """Return where a document or delta blob lies, if it is here."""
        return self.root / "blobs" / f"{digest}.bin"

    def has_blob(self, digest: str) -> bool:
        """Say whether a document or delta blob is here (by name; ``read_blob`` verifies)."""
        return is_there(self.blob_path(digest), stat.S_ISREG)

    def blobs(self) -> list[str]:
        """Return the digests of all documents and delta blobs that are here."""
        names = names_in(self.root / "blobs")
        return [name[:-4] for name in names if name.endswith(".bin") and is_digest(name[:-4])]

    def read_blob(self, digest: str, limit: int = MAX_DOCUMENT_BYTES) -> bytes | None:
        """Return a blob's verified bytes; None if it is not here, or was damaged (and removed)."""
        path = self.blob_path(digest)
        try:
            data = _read(path, limit)
        except StateError:
            data = b""
        if data is not None and digest_of(data) != digest:
            self.remove_blob(digest)
            return None
        return data

    def read_document(self, digest: str) -> bytes | None:
        """Return a blob's verified bytes if it may be a document; None if it is not here, or none.

        Delta blobs may be longer than any document, and are left alone.
        """
        path = self.blob_path(digest)
        with disk_errors(path, "reading"):
            try:
                with open(path, "rb") as file:
                    first, size = file.read(1), os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                return None
        if size > MAX_DOCUMENT_BYTES or first not in (b"{", b" ", b"\t", b"\r", b"\n"):
            return None
        return self.read_blob(digest)

    def write_blob(self, digest: str, data: bytes) -> None:
        """Keep a document or delta blob.

        Raises:
            IntegrityError: If ``data`` does not have that digest.
        """
        found = digest_of(data)
        if found != digest:
            raise IntegrityError(f"blob has digest {found}, not {digest}")
        if not self.has_blob(digest):
            atomic_write(self.blob_path(digest), data)

    def temporary(self, name: str) -> Path:
        """Return a fresh path under ``state/tmp`` to fill and then keep."""
        directory = self.root / "state" / "tmp"
        with disk_errors(directory, "making the directory"):
            directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{name}.{os.getpid()}.{next(_unique)}"

    def keep_blob(self, digest: str, temporary: Path) -> None:
        """Move a complete and verified temporary file to its place in ``blobs/``."""
        path = self.blob_path(digest)
        with disk_errors(path, "keeping"):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
            fsync_directory(path.parent)

    def remove_blob(self, digest: str) -> None:
        """Remove a blob; what is gone already is fine."""
        with contextlib.suppress(OSError):
            os.unlink(self.blob_path(digest))

    def load_version(self, ref: VersionRef) -> Version | None:
        """Assemble a complete version from ``blobs/``; None while a document is missing.

        Raises:
            MalformedError, TrustError: If its documents are not what they should be.
        """
        data = self.read_blob(ref.manifest)
        if data is None:
            return None
        manifest = manifests.decode_manifest(data)
        layout = self.read_blob(manifest.layout)
        parts = [self.read_blob(digest) for digest in manifest.parts]
        if layout is None or None in parts:
            return None
        return manifests.assemble(
            ref,
            self.run,
            manifest,
            decode_layout(layout),
            [decode_part(part) for part in parts if part is not None],
        )

    def load_open(self, ref: OpenRef) -> Version | None:
        """Assemble an open version with the parts that are here; None without its layout.

        Raises:
            MalformedError, TrustError: If its documents are not what they should be.
        """
        layout = self.read_blob(ref.layout)
        if layout is None:
            return None
        parts = [part for digest in ref.parts if (part := self.read_blob(digest)) is not None]
        return manifests.assemble_open(
            ref, self.run, decode_layout(layout), [decode_part(part) for part in parts]
        )

    # --- which documents describe a version on disk -----------------------------------------

    def state_path(self, number: int) -> Path:
        """Return where the description of a version lies: which documents it has."""
        return self.root / "state" / f"{number:06d}.json"

    def save_state(self, version: Version) -> None:
        """Remember which documents describe a version."""
        parts = version.documents[1:] if version.manifest is None else version.documents[2:]
        state = StoredState(
            run=self.run,
            version=version.number,
            layout=version.layout_digest,
            manifest=version.manifest,
            parts=list(parts),
        )
        atomic_write(self.state_path(version.number), encode(state))

    def load_state(self, number: int) -> Version | None:
        """Assemble a version from what ``save_state`` remembered.

        Returns:
            None if that, or a document that it names, is missing or damaged.

        Raises:
            DiskError: If the system refuses to read.
        """
        try:
            data = _read(self.state_path(number), MAX_DOCUMENT_BYTES)
            if data is None:
                return None
            state = decode(data, StoredState, limit=MAX_DOCUMENT_BYTES, what="stored state")
            if (state.run, state.version) != (self.run, number):
                return None
            layout_data = self.read_blob(state.layout)
            if layout_data is None:
                return None
            layout = decode_layout(layout_data)
            if state.manifest is not None:
                ref = VersionRef(
                    version=state.version,
                    step=layout.step,
                    manifest=state.manifest,
                    bytes=layout.total_bytes,
                    deltas=[],
                )
                return self.load_version(ref)
            return self.load_open(
                OpenRef(
                    version=state.version,
                    step=layout.step,
                    layout=state.layout,
                    parts=state.parts,
                    deltas=[],
                )
            )
        except (MalformedError, StateError):
            return None


def _read(path: Path, limit: int) -> bytes | None:
    """Return a file's bytes; None if it is not there.

    Raises:
        StateError: If it is longer than ``limit`` bytes.
        DiskError: If the system refuses.
    """
    with disk_errors(path, "reading"):
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
    if len(data) > limit:
        raise StateError(f"file is longer than {limit} bytes", source=str(path))
    return data
