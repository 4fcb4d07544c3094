"""What local and remote publishing share: options, observers, documents of a version."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from shardcast.deltas import Delta
from shardcast.errors import (
    UsageError,
)
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import VersionRef
from shardcast.protocol.layout import (
    FileEntry,
    Layout,
    choose_shard_bytes,
    encode_layout,
    encode_part,
    split_parts,
)
from shardcast.protocol.limits import (
    MAX_BYTES,
    MAX_DELTAS,
    MAX_METADATA_BYTES,
    MAX_METADATA_ITEMS,
    MAX_TEXT_CHARS,
    MAX_VERSIONS,
    ONE_SHOT_EXPIRY_MS,
)
from shardcast.protocol.manifest import Version, encode_manifest
from shardcast.sources import Selection, select_files
from shardcast.store.retention import Collected
from shardcast.store.stored import Durability
from shardcast.streaming import Pace

DEFAULT_KEEP: Final = 4
_TICKS_NS: Final = 20_000_000


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """What to publish and how.

    Attributes:
        source: The checkpoint directory.
        step: The trainer's step, or None.
        link: Hard-link instead of copying; for directories that are written once.
        include: Globs of files to publish although they are left out by default.
        exclude: Globs of files to leave out.
        lineage: A new string when a trainer restarts from an older step; None: as before.
        metadata: Strings that travel in the layout.
        keep: How many versions the head retains.
        durability: Whether files are synced before the version is announced.
        threads: Threads that hash; None: all cores.
        expiry_ms: How long the head is fresh.
        delta: Whether to announce a delta from the version before.
        delta_bases: Further bases: 2 is the version before the last one. Only those on disk count.
        compress: Whether to announce a compressed copy, too.
        take_over: Make the store an origin's, even if it is a relay's.
        refuse_nonfinite: Publish nothing if a tensor holds NaN or an infinity.
        stream: How often the version is announced while it is made; None: only once it is whole.
    """

    source: Path
    step: int | None = None
    link: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    lineage: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    keep: int = DEFAULT_KEEP
    durability: Durability = Durability.SYNC
    threads: int | None = None
    expiry_ms: int = ONE_SHOT_EXPIRY_MS
    delta: bool = True
    delta_bases: Sequence[int] = ()
    compress: bool = False
    take_over: bool = False
    refuse_nonfinite: bool = False
    stream: Pace | None = field(default_factory=Pace)

    def __post_init__(self) -> None:
        """Check what would otherwise be found out after everything was hashed.

        Raises:
            UsageError: Naming the option.
        """
        if self.step is not None and not 0 <= self.step <= MAX_BYTES:
            raise UsageError(f"--step {self.step} is not from 0 to {MAX_BYTES}")
        if self.lineage is not None and not 0 < len(self.lineage) <= MAX_TEXT_CHARS:
            raise UsageError(f"--lineage has 1 to {MAX_TEXT_CHARS} characters")
        if any(not 1 <= base <= MAX_VERSIONS for base in self.delta_bases):
            raise UsageError(f"--delta-bases: versions back, each from 1 to {MAX_VERSIONS}")
        if len(set(self.delta_bases)) > MAX_DELTAS - 2:
            raise UsageError(f"--delta-bases: at most {MAX_DELTAS - 2} of them")
        if self.delta_bases and not self.delta:
            raise UsageError("--delta-bases cannot go with --no-delta")
        texts = [text for item in self.metadata.items() for text in item]
        try:
            weight = len("".join(texts).encode())
            (self.lineage or "").encode()
        except UnicodeEncodeError:
            raise UsageError("--metadata and --lineage must be text in UTF-8") from None
        if weight > MAX_METADATA_BYTES or len(self.metadata) > MAX_METADATA_ITEMS:
            raise UsageError(
                f"--metadata: {len(self.metadata)} items of {weight} bytes; at most "
                f"{MAX_METADATA_ITEMS} of {MAX_METADATA_BYTES} bytes in all"
            )


class PublishObserver(Protocol):
    """Hears how a publication goes; called from several threads."""

    def selected(self, selection: Selection) -> None:
        """The files are known."""
        ...

    def hashed(self, count: int) -> None:
        """``count`` more bytes were hashed (and copied)."""
        ...

    def uploading(self, total: int) -> None:
        """A remote origin lacks ``total`` bytes."""
        ...

    def uploaded(self, count: int) -> None:
        """``count`` more bytes were uploaded."""
        ...

    def waiting(self, message: str) -> None:
        """Another publisher is at work."""
        ...

    def noticed(self, message: str) -> None:
        """Something that people should know, although the publication goes on."""
        ...


class SilentObserver:
    """Hears everything and says nothing."""

    def selected(self, selection: Selection) -> None:
        """Do nothing."""

    def hashed(self, count: int) -> None:
        """Do nothing."""

    def uploading(self, total: int) -> None:
        """Do nothing."""

    def uploaded(self, count: int) -> None:
        """Do nothing."""

    def waiting(self, message: str) -> None:
        """Do nothing."""

    def noticed(self, message: str) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Published:
    """What was announced.

    Attributes:
        ref: The head's entry: version, step, manifest, bytes.
        path: The version's directory in the store, or None at a remote origin.
        selection: What was published and left out.
        uploaded_bytes: What a remote origin lacked; 0 in a local store.
        method: ``clone``, ``copy``, ``link`` or ``upload``.
        collected: What retention removed, or None.
        deltas: The deltas that were announced.
        streamed: How many heads said what was ready before it was whole.
    """

    run: str
    ref: VersionRef
    path: Path | None
    selection: Selection
    uploaded_bytes: int
    method: str
    collected: Collected | None
    deltas: tuple[Delta, ...] = ()
    streamed: int = 0


@dataclass(frozen=True, slots=True)
class Documents:
    """A version's documents as bytes, by digest, in upload order; and the version itself."""

    version: Version
    blobs: Mapping[str, bytes]


def plan_layout(
    options: PublishOptions,
    selection: Selection,
    run: str,
    number: int,
    previous: Layout | None,
    now_ms: int,
) -> Layout:
    """Return the layout of the version to publish."""
    shard_bytes = choose_shard_bytes(
        selection.total_bytes, None if previous is None else previous.shard_bytes
    )
    lineage = options.lineage
    if lineage is None:
        lineage = previous.lineage if previous is not None else f"{run}-{now_ms}"
    return Layout(
        run=run,
        version=number,
        step=options.step,
        lineage=lineage,
        created_at=now_ms,
        shard_bytes=shard_bytes,
        metadata=dict(options.metadata),
        files=[FileEntry(path=f.path, bytes=f.stamp.bytes) for f in selection.files],
    )


def documents_of(layout: Layout, digests: Sequence[str]) -> Documents:
    """Return layout, parts and manifest of a complete version."""
    layout_data = encode_layout(layout)
    layout_digest = digest_of(layout_data)
    blobs = {layout_digest: layout_data}
    parts = []
    for first, some in split_parts(list(digests)):
        data = encode_part(layout_digest, first, some)
        parts.append(digest_of(data))
        blobs[parts[-1]] = data
    manifest_data = encode_manifest(layout_digest, parts)
    manifest = digest_of(manifest_data)
    blobs[manifest] = manifest_data
    version = Version(
        layout=layout,
        layout_digest=layout_digest,
        digests=tuple(digests),
        manifest=manifest,
        documents=(manifest, layout_digest, *parts),
    )
    return Documents(version, blobs)


def reference(version: Version, deltas: Sequence[Delta] = ()) -> VersionRef:
    """Return the head's entry for a complete version."""
    if version.manifest is None:
        raise UsageError(f"version {version.number} is not complete")
    return VersionRef(
        version=version.number,
        step=version.layout.step,
        manifest=version.manifest,
        bytes=version.layout.total_bytes,
        deltas=[delta.ref for delta in deltas],
    )


def settled_selection(options: PublishOptions) -> Selection:
    """List the directory so that every later modification changes a stamp; check what is asked for.

    Clocks of file systems tick every few milliseconds (jiffies): a file modified within the
    tick of its own mtime would look untouched, so a file that fresh is given two ticks.

    Raises:
        UsageError, MalformedError, DiskError: As ``select_files``.
        NonFiniteError: If that is to be refused, and a tensor holds NaN or an infinity.
    """
    selection = _settled(options)
    if options.refuse_nonfinite:
        from shardcast.finite import refuse_nonfinite

        # What changes from here on changes its stamp too, and is refused when it is hashed.
        files = [(file.path, file.location, file.stamp.bytes) for file in selection.files]
        refuse_nonfinite(files, threads=options.threads)
    return selection


def _settled(options: PublishOptions) -> Selection:
    selection = select_files(options.source, include=options.include, exclude=options.exclude)
    newest = max(file.stamp.mtime_ns for file in selection.files)
    if abs(time.time_ns() - newest) < _TICKS_NS:
        time.sleep(_TICKS_NS / 1e9)
        return select_files(options.source, include=options.include, exclude=options.exclude)
    return selection
