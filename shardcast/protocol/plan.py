"""How to get a version: which shards are here, which are on disk elsewhere, which to fetch.

Pure: a plan is a value that tests read and a short runner performs. So is the choice between
finishing the version that is on its way and dropping it for a newer one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from shardcast.protocol.delta import DeltaBlob, DeltaPart
from shardcast.protocol.layout import Extent, Layout
from shardcast.protocol.manifest import Version

WASTE_SHARE: Final = 0.2
"""Of what a worker fetches until it reaches a version, at most this share is thrown away for newer
ones: so it reaches one within 1.25 times the bytes of a copy, however fast versions come."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Another version on this disk, complete or not, and which of its shards were verified."""

    version: Version
    verified: Collection[int]


@dataclass(frozen=True, slots=True)
class FileReuse:
    """File ``file`` of the target has the same bytes as ``source_path`` of ``source_version``."""

    file: int
    source_version: int
    source_path: str


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """Extent ``target`` has the same bytes as ``source`` of ``source_version``."""

    target: Extent
    source_version: int
    source: Extent


@dataclass(frozen=True, slots=True)
class ShardFetch:
    """A digest to fetch once, and every extent that has it (the first is written to)."""

    digest: str
    length: int
    targets: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta part that leads to the target.

    Attributes:
        base: Number of the version that it starts from, None for a compressed copy.
        part: Which blobs rebuild which shards.
    """

    base: int | None
    part: DeltaPart


@dataclass(frozen=True, slots=True)
class DeltaFetch:
    """A delta blob to fetch.

    Attributes:
        base: Number of the version that its frames start from, None for a compressed copy.
        blob: The blob; its frames rebuild consecutive shards from ``first_shard`` on.
        first_shard: The first of them.
        targets: Those of them that are wanted.
    """

    base: int | None
    blob: DeltaBlob
    first_shard: int
    targets: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The work list for one version.

    Attributes:
        files: Whole files that are here already under another version.
        copies: Single shards that are.
        deltas: Delta blobs that are cheaper than the shards they rebuild.
        fetches: What must come over the network, in shard order, each digest once.
        repeats: Shards equal to one that is done already in the target itself, or rebuilt there.
        unknown: Shards of an open version whose digest no part has named yet.
        done_bytes: Bytes of the target that were verified before.
    """

    files: tuple[FileReuse, ...]
    copies: tuple[ShardCopy, ...]
    deltas: tuple[DeltaFetch, ...]
    fetches: tuple[ShardFetch, ...]
    repeats: tuple[ShardCopy, ...]
    unknown: tuple[int, ...]
    done_bytes: int

    @property
    def fetch_bytes(self) -> int:
        """What the network must carry."""
        shards = sum(fetch.length for fetch in self.fetches)
        return shards + sum(fetch.blob.bytes for fetch in self.deltas)


def network_share(plan: Plan, most_bytes: int, *, plain: bool) -> Plan:
    """Return what the network brings first of a plan: so many bytes, or one blob that is more.

    Nothing is copied by it but what equals a shard that it rebuilds.

    Args:
        plan: The plan.
        most_bytes: How much.
        plain: Whether shards may be fetched as they are.
    """
    deltas: list[DeltaFetch] = []
    fetches: list[ShardFetch] = []
    left = most_bytes
    for delta in plan.deltas:
        if left <= 0:
            break
        deltas.append(delta)
        left -= delta.blob.bytes
    for fetch in plan.fetches if plain else ():
        if left <= 0:
            break
        fetches.append(fetch)
        left -= fetch.length
    rebuilt = {extent.shard for delta in deltas for extent in delta.targets}
    return Plan(
        files=(),
        copies=(),
        deltas=tuple(deltas),
        fetches=tuple(fetches),
        repeats=tuple(repeat for repeat in plan.repeats if repeat.source.shard in rebuilt),
        unknown=plan.unknown,
        done_bytes=plan.done_bytes,
    )


def worth_switching(
    left_bytes: int, fresh_bytes: int, *, wasted_bytes: int, spent_bytes: int
) -> bool:
    """Say whether the version on its way should be dropped for a newer one.

    Yes where that costs nothing (the newer one is reached no later than the older one would be),
    and as long as little is thrown away. Otherwise the older one is finished first: a worker whose
    link is slower than versions come would never reach any.

    Args:
        left_bytes: What the network must still carry for the version on its way.
        fresh_bytes: What it must carry for the newer one, with all that is here by now.
        wasted_bytes: What earlier switches threw away since a version was last reached.
        spent_bytes: What the network carried since then.
    """
    extra = max(fresh_bytes - left_bytes, 0)
    return extra == 0 or wasted_bytes + extra <= WASTE_SHARE * (spent_bytes + fresh_bytes)


def plan_version(
    target: Version,
    done: Collection[int],
    holdings: Sequence[Holding],
    deltas: Sequence[Delta] = (),
) -> Plan:
    """Plan the cheapest way from what is held to ``target``, shard by shard.

    Args:
        target: The version wanted.
        done: Its shards that are on disk and verified.
        holdings: Other versions, best source first.
        deltas: Delta parts that lead to it, best first. One is used where the shards of its base
            that lie where its own shards do are held and verified, whether or not the rest of the
            base ever came; of a blob, the frames of which that holds.
    """
    layout, digests = target.layout, target.digests
    done = frozenset(done)
    files = _whole_files(target, done, holdings)
    by_file = {shard for reuse in files for shard in layout.file_shards(reuse.file)}
    available = _shards_by_digest(holdings)
    own = {digests[shard]: layout.extent(shard) for shard in sorted(done, reverse=True)}
    copies: list[ShardCopy] = []
    repeats: list[ShardCopy] = []
    unknown: list[int] = []
    wanted: dict[str, list[Extent]] = {}
    for shard, digest in enumerate(digests):
        if shard in done or shard in by_file:
            continue
        extent = layout.extent(shard)
        if digest is None:
            unknown.append(shard)
        elif digest in own:
            repeats.append(ShardCopy(extent, target.number, own[digest]))
        elif (digest, extent.length) in available:
            number, source = available[digest, extent.length]
            copies.append(ShardCopy(extent, number, source))
        else:
            wanted.setdefault(digest, []).append(extent)
    chosen = _choose_deltas(target, wanted, holdings, deltas, repeats)
    return Plan(
        files=tuple(files),
        copies=tuple(copies),
        deltas=tuple(chosen),
        fetches=tuple(ShardFetch(d, es[0].length, tuple(es)) for d, es in wanted.items()),
        repeats=tuple(repeats),
        unknown=tuple(unknown),
        done_bytes=sum(layout.extent(shard).length for shard in done),
    )


def _whole_files(
    target: Version, done: frozenset[int], holdings: Sequence[Holding]
) -> list[FileReuse]:
    known: dict[tuple[int, tuple[str | None, ...]], tuple[int, str]] = {}
    for holding in holdings:
        version, verified = holding.version, frozenset(holding.verified)
        for index, entry in enumerate(version.layout.files):
            shards = version.layout.file_shards(index)
            if shards and verified.issuperset(shards):
                digests = version.digests[shards.start : shards.stop]
                known.setdefault((entry.bytes, digests), (version.number, entry.path))
    reuses: list[FileReuse] = []
    for index, entry in enumerate(target.layout.files):
        shards = target.layout.file_shards(index)
        digests = target.digests[shards.start : shards.stop]
        if not shards or None in digests or not done.isdisjoint(shards):
            continue
        if (entry.bytes, digests) in known:
            reuses.append(FileReuse(index, *known[entry.bytes, digests]))
    return reuses


def _shards_by_digest(
    holdings: Sequence[Holding],
) -> dict[tuple[str, int], tuple[int, Extent]]:
    found: dict[tuple[str, int], tuple[int, Extent]] = {}
    for holding in holdings:
        layout = holding.version.layout
        for shard in holding.verified:
            digest, extent = holding.version.digests[shard], layout.extent(shard)
            if digest is not None:
                found.setdefault((digest, extent.length), (holding.version.number, extent))
    return found


def _choose_deltas(
    target: Version,
    wanted: dict[str, list[Extent]],
    holdings: Sequence[Holding],
    deltas: Sequence[Delta],
    repeats: list[ShardCopy],
) -> list[DeltaFetch]:
    """Choose the delta blobs that cost less than what they rebuild; take that from ``wanted``.

    Extents elsewhere that have a rebuilt digest, too, become repeats.
    """
    bases = {holding.version.number: _Coverage(holding) for holding in holdings}
    chosen: list[DeltaFetch] = []
    for delta in deltas:
        base = None if delta.base is None else bases.get(delta.base)
        if base is None and delta.base is not None:
            continue
        for blob, frames in delta.part.placed():
            if frames[-1].shards.stop > target.layout.shard_count:
                break
            usable = {
                shard
                for frame in frames
                if base is None or base.covers(target.layout, frame.shards)
                for shard in frame.shards
            }
            digests = {d for s in usable if (d := target.digests[s]) is not None and d in wanted}
            if blob.bytes >= sum(wanted[digest][0].length for digest in digests):
                continue
            extents = [extent for digest in sorted(digests) for extent in wanted.pop(digest)]
            inside = {e.shard: e for e in extents if e.shard in usable}
            first = {target.digests[e.shard]: e for e in reversed(inside.values())}
            repeats += [
                ShardCopy(e, target.number, first[target.digests[e.shard]])
                for e in extents
                if e.shard not in inside
            ]
            targets = tuple(inside[shard] for shard in sorted(inside))
            chosen.append(DeltaFetch(delta.base, blob, frames[0].shards.start, targets))
    return chosen


class _Coverage:
    """Which bytes of a held version are verified, by path."""

    def __init__(self, holding: Holding) -> None:
        self._layout = holding.version.layout
        self._verified = frozenset(holding.verified)
        self._files = {entry.path: n for n, entry in enumerate(self._layout.files)}

    def covers(self, layout: Layout, shards: range) -> bool:
        """Say whether the base has good bytes where these shards of ``layout`` lie.

        A frame names its own base ranges, so where the base has gaps this is a guess, right where
        tensors stay in place; a wrong one costs a delta blob, never a wrong byte.
        """
        return len(self._verified) == self._layout.shard_count or all(
            self._covers(layout.extent(shard)) for shard in shards
        )

    def _covers(self, extent: Extent) -> bool:
        file = self._files.get(extent.path)
        if file is None:
            return False
        own = self._layout.file_shards(file)
        size = self._layout.shard_bytes
        first = own.start + extent.offset // size
        last = own.start + (extent.offset + extent.length - 1) // size
        return all(shard in self._verified for shard in range(first, min(last + 1, own.stop)))
