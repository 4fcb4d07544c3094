"""How to get a version: which shards are here, which are on disk elsewhere, which to fetch.

Pure: a plan is a value that tests read and a short runner performs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardcast.protocol.layout import Extent
from shardcast.protocol.manifest import Version


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
class Plan:
    """The work list for one version.

    Attributes:
        files: Whole files that are here already under another version.
        copies: Single shards that are.
        fetches: What must come over the network, in shard order, each digest once.
        repeats: Shards equal to one that is done already in the target itself.
        unknown: Shards of an open version whose digest no part has named yet.
        done_bytes: Bytes of the target that were verified before.
    """

    files: tuple[FileReuse, ...]
    copies: tuple[ShardCopy, ...]
    fetches: tuple[ShardFetch, ...]
    repeats: tuple[ShardCopy, ...]
    unknown: tuple[int, ...]
    done_bytes: int

    @property
    def fetch_bytes(self) -> int:
        """What the network must carry."""
        return sum(fetch.length for fetch in self.fetches)


def plan_version(target: Version, done: Collection[int], holdings: Sequence[Holding]) -> Plan:
    """Plan the cheapest way from what is held to ``target``, shard by shard.

    Args:
        target: The version wanted.
        done: Its shards that are on disk and verified.
        holdings: Other versions, best source first.
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
    return Plan(
        files=tuple(files),
        copies=tuple(copies),
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
