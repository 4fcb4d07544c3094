"""What each digest of a run is, as far as its head and documents tell. Pure.

Only what a head reaches is in it, so a relay cannot be used as an open cache. A version that a newer
head does not list any more may stay for a while, for those who are still fetching it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from shardcast.errors import ShardcastError
from shardcast.protocol import manifest as manifests
from shardcast.protocol.delta import DeltaBlob, DeltaPart, decode_delta_part
from shardcast.protocol.head import DeltaRef, Head, OpenDeltaRef, OpenRef, VersionRef
from shardcast.protocol.layout import Layout, Part, decode_layout, decode_part
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from shardcast.protocol.manifest import Manifest, Version


class Kind(enum.Enum):
    """What kind of document a digest is."""

    MANIFEST = "manifest"
    LAYOUT = "layout"
    PART = "part"
    DELTA_PART = "delta part"


MOST_LINGERING: Final = 2
"""So many versions that the head dropped stay for their readers: nobody can pin more of the disk."""

Parsed = Manifest | Layout | Part | DeltaPart


@dataclass(frozen=True, slots=True)
class DocumentBlob:
    """A document: its size is not known before it is here, but bounded."""

    digest: str
    kind: Kind

    @property
    def limit(self) -> int:
        """Most bytes it may have."""
        return MAX_DOCUMENT_BYTES


@dataclass(frozen=True, slots=True)
class DataBlob:
    """A delta blob, and the newest version that it leads to."""

    digest: str
    length: int
    version: int


@dataclass(frozen=True, slots=True)
class Place:
    """One extent that holds (or will hold) a shard's bytes."""

    version: int
    shard: int


@dataclass(frozen=True, slots=True)
class ShardBlob:
    """A shard: where its bytes may lie, newest version first."""

    digest: str
    length: int
    places: tuple[Place, ...]


Known = DocumentBlob | DataBlob | ShardBlob


def parse_document(kind: Kind, data: bytes) -> Parsed:
    """Decode a document of a known kind.

    Raises:
        MalformedError: If it is not one.
    """
    match kind:
        case Kind.MANIFEST:
            return manifests.decode_manifest(data)
        case Kind.LAYOUT:
            return decode_layout(data)
        case Kind.PART:
            return decode_part(data)
        case Kind.DELTA_PART:
            return decode_delta_part(data)


@dataclass
class _Branch:
    """What is known below one version of the head."""

    ref: VersionRef | OpenRef
    version: Version | None = None
    index: dict[str, int] = field(default_factory=dict)
    delta_parts: dict[str, DeltaPart] = field(default_factory=dict)
    blobs: dict[str, DeltaBlob] = field(default_factory=dict)
    problem: str | None = None
    delta_problem: str | None = None

    @property
    def deltas(self) -> list[DeltaRef] | list[OpenDeltaRef]:
        return self.ref.deltas


class Catalog:
    """The digests that one run's head reaches. Not thread-safe.

    Attributes:
        head: The newest accepted head, None before the first.
    """

    def __init__(self, run: str) -> None:
        self.head: Head | None = None
        self._run = run
        self._branches: dict[int, _Branch] = {}  # newest first
        self._parsed: dict[str, Parsed] = {}
        self._done: set[str] = set()  # documents whose content is folded into a version, or bad
        self._kinds: dict[str, Kind] = {}
        self._lingering: set[int] = set()

    # --- what changes it ----------------------------------------------------------------------

    def set_head(self, head: Head, linger: Collection[int] = ()) -> list[Version]:
        """Follow a new head; forget what it no longer reaches.

        Args:
            head: The head.
            linger: Versions that stay although it dropped them, unless it withdrew them.

        Returns:
            Versions that are new or have grown.
        """
        self.head = head
        before = self._branches
        refs: list[VersionRef | OpenRef] = [] if head.open is None else [head.open]
        refs += head.versions
        self._branches = {}
        for ref in refs:
            old = before.get(ref.version)
            if old is not None and _same_identity(old.ref, ref):
                old.ref = ref
                self._branches[ref.version] = old
            else:
                self._branches[ref.version] = _Branch(ref)
        for number in self._staying(before, linger):
            if number not in head.withdrawn:
                self._branches.setdefault(number, before[number])
        return self._refresh()

    def _staying(self, before: dict[int, _Branch], linger: Collection[int]) -> list[int]:
        """Return which versions linger: a few at most, those that do already before others."""
        possible = [
            number
            for number, branch in before.items()
            if number in linger and branch.version is not None and branch.version.complete
            if number not in self._branches
        ]
        possible.sort(key=lambda number: (number not in self._lingering, -number))
        self._lingering = set(possible[:MOST_LINGERING])
        return sorted(self._lingering, reverse=True)

    def forget(self, numbers: Collection[int]) -> None:
        """Forget lingering versions. Versions of the head stay."""
        gone = [number for number in self.lingering() if number in numbers]
        for number in gone:
            del self._branches[number]
        if gone:
            self._refresh()

    def learn(self, digest: str, document: Parsed | None) -> list[Version]:
        """Take in a document whose bytes have ``digest``; None: it is malformed.

        Returns:
            Versions that are new or have grown.
        """
        if digest not in self._kinds:
            return []
        if document is None:
            self._done.add(digest)
            return []
        self._parsed[digest] = document
        return self._refresh()

    def reject(self, version: int, problem: str) -> None:
        """Forget what the documents of a version say: they contradict what was seen before."""
        branch = self._branches.get(version)
        if branch is not None:
            branch.version, branch.index, branch.problem = None, {}, problem

    # --- what it tells --------------------------------------------------------------------------

    def find(self, digest: str) -> Known | None:
        """Return what a digest is, or None where the head does not reach it (yet)."""
        kind = self._kinds.get(digest)
        if kind is not None:
            return DocumentBlob(digest, kind)
        places: list[Place] = []
        length = 0
        for number, branch in self._branches.items():
            shard = branch.index.get(digest)
            if shard is not None and branch.version is not None:
                places.append(Place(number, shard))
                length = branch.version.layout.extent(shard).length
        if places:
            return ShardBlob(digest, length, tuple(places))
        for number, branch in self._branches.items():
            blob = branch.blobs.get(digest)
            if blob is not None:
                return DataBlob(digest, blob.bytes, number)
        return None

    def version(self, number: int) -> Version | None:
        """Return a version, if enough of its documents are here."""
        branch = self._branches.get(number)
        return branch.version if branch is not None else None

    def versions(self) -> list[Version]:
        """Return all versions that are known by their documents, newest first."""
        return [b.version for b in self._branches.values() if b.version is not None]

    def numbers(self) -> list[int]:
        """Return the numbers of all versions of the head, the open one too, newest first."""
        return [number for number in self._branches if self._listed(number)]

    def lingering(self) -> list[int]:
        """Return the numbers of the versions that the head dropped and that are still served."""
        return [number for number in self._branches if not self._listed(number)]

    def lingers(self, known: Known) -> bool:
        """Say whether only versions that the head dropped have a blob."""
        gone = set(self.lingering())
        match known:
            case ShardBlob():
                return all(place.version in gone for place in known.places)
            case DataBlob():
                return known.version in gone
            case DocumentBlob():
                named = (
                    n for n, b in self._branches.items() if known.digest in dict(self._named(b))
                )
                return bool(gone) and all(number in gone for number in named)

    def digests(self) -> frozenset[str]:
        """Return the documents and delta blobs of all versions, also of those that linger."""
        return frozenset(self._kinds).union(*(branch.blobs for branch in self._branches.values()))

    def _listed(self, number: int) -> bool:
        head = self.head
        if head is None:
            return False
        return head.ref(number) is not None or (
            head.open is not None and head.open.version == number
        )

    def problem(self, number: int) -> str | None:
        """Return why a version's documents are not usable, or None."""
        branch = self._branches.get(number)
        return None if branch is None else branch.problem or branch.delta_problem

    def delta_blobs(self, number: int) -> list[DeltaBlob]:
        """Return the delta blobs that lead to a version, as far as they are known."""
        branch = self._branches.get(number)
        return list(branch.blobs.values()) if branch is not None else []

    def delta_parts(self, number: int, base: str | None) -> list[DeltaPart]:
        """Return the delta parts that lead from a manifest to a version, as far as they are here."""
        branch = self._branches.get(number)
        parts = branch.delta_parts.values() if branch is not None else ()
        return sorted((p for p in parts if p.base == base), key=lambda part: part.first_shard)

    def missing_documents(self, number: int) -> list[DocumentBlob]:
        """Return the documents of a version that are named and not here yet."""
        branch = self._branches.get(number)
        if branch is None:
            return []
        return [
            DocumentBlob(digest, kind)
            for digest, kind in self._named(branch)
            if digest not in self._parsed and digest not in self._done
        ]

    # --- inner workings ---------------------------------------------------------------------

    def _named(self, branch: _Branch) -> Iterator[tuple[str, Kind]]:
        ref = branch.ref
        if isinstance(ref, OpenRef):
            yield ref.layout, Kind.LAYOUT
            yield from ((digest, Kind.PART) for digest in ref.parts)
        else:
            yield ref.manifest, Kind.MANIFEST
            manifest = self._parsed.get(ref.manifest)
            if isinstance(manifest, Manifest):
                yield manifest.layout, Kind.LAYOUT
                yield from ((digest, Kind.PART) for digest in manifest.parts)
            elif branch.version is not None:  # it was open a moment ago
                layout, *parts = branch.version.documents
                yield layout, Kind.LAYOUT
                yield from ((digest, Kind.PART) for digest in parts)
        for delta in branch.deltas:
            yield from ((digest, Kind.DELTA_PART) for digest in delta.parts)

    def _refresh(self) -> list[Version]:
        changed = []
        for branch in self._branches.values():
            version = self._assemble(branch) if branch.problem is None else None
            if version is not None and version is not branch.version:
                branch.version = version
                branch.index = {}
                for shard, digest in enumerate(version.digests):
                    if digest is not None:
                        branch.index.setdefault(digest, shard)
                changed.append(version)
            self._learn_blobs(branch)
        self._kinds = {
            digest: kind for b in self._branches.values() for digest, kind in self._named(b)
        }
        self._fold()
        return changed

    def _assemble(self, branch: _Branch) -> Version | None:
        ref = branch.ref
        try:
            if isinstance(ref, OpenRef):
                return self._assemble_open(branch, ref)
            if branch.version is not None and branch.version.manifest == ref.manifest:
                return branch.version
            manifest = self._parsed.get(ref.manifest)
            if not isinstance(manifest, Manifest):
                return None
            layout = self._parsed.get(manifest.layout)
            parts = [part for d in manifest.parts if isinstance(part := self._parsed.get(d), Part)]
            if not isinstance(layout, Layout) or len(parts) != len(manifest.parts):
                return None
            return manifests.assemble(ref, self._run, manifest, layout, parts)
        except ShardcastError as error:
            branch.problem = str(error)
            return None

    def _assemble_open(self, branch: _Branch, ref: OpenRef) -> Version | None:
        layout = self._parsed.get(ref.layout)
        if not isinstance(layout, Layout):
            return None
        here = [digest for digest in ref.parts if isinstance(self._parsed.get(digest), Part)]
        known = branch.version
        if known is not None and known.manifest is None and known.documents[1:] == tuple(here):
            return known
        parts = [part for d in here if isinstance(part := self._parsed.get(d), Part)]
        listed = OpenRef(
            version=ref.version, step=ref.step, layout=ref.layout, parts=here, deltas=[]
        )
        return manifests.assemble_open(listed, self._run, layout, parts)

    def _learn_blobs(self, branch: _Branch) -> None:
        target = self._layout_of(branch)
        if target is None:
            return
        listed = {digest: delta.base for delta in branch.deltas for digest in delta.parts}
        fresh = {d: part for d, part in branch.delta_parts.items() if d in listed}
        for digest, base in listed.items():
            part = self._parsed.get(digest)
            if not isinstance(part, DeltaPart):
                continue
            self._done.add(digest)
            if part.layout == target and part.base == base:
                fresh[digest] = part
            else:
                branch.delta_problem = f"delta part {digest} is of another layout or base"
        if fresh != branch.delta_parts:
            branch.delta_parts = fresh
            branch.blobs = {blob.digest: blob for part in fresh.values() for blob in part.blobs}

    def _layout_of(self, branch: _Branch) -> str | None:
        if isinstance(branch.ref, OpenRef):
            return branch.ref.layout
        if branch.version is not None:
            return branch.version.layout_digest
        manifest = self._parsed.get(branch.ref.manifest)
        return manifest.layout if isinstance(manifest, Manifest) else None

    def _fold(self) -> None:
        """Drop the parsed form of what nothing names, and of parts that a closed version holds."""
        kept: set[str] = set()
        for branch in self._branches.values():
            folded = branch.version is not None and branch.version.complete
            for digest, kind in self._named(branch):
                kept.add(digest)
                parsed = self._parsed.get(digest)
                if parsed is not None and kind is Kind.PART and folded:
                    self._done.add(digest)
        self._done &= kept
        self._parsed = {
            digest: parsed
            for digest, parsed in self._parsed.items()
            if digest in kept and (digest not in self._done or not _heavy(parsed))
        }


def _heavy(parsed: Parsed) -> bool:
    return isinstance(parsed, Part | DeltaPart)


def _same_identity(old: VersionRef | OpenRef, new: VersionRef | OpenRef) -> bool:
    if isinstance(old, OpenRef) and isinstance(new, OpenRef):
        return old.layout == new.layout
    if isinstance(old, VersionRef) and isinstance(new, VersionRef):
        return old.manifest == new.manifest
    # The open version closed: it keeps its place until its manifest is here.
    return isinstance(old, OpenRef) and isinstance(new, VersionRef)
