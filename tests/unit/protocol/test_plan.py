"""Plans as values."""

import pytest

from shardcast.protocol.delta import DeltaBlob, DeltaPart
from shardcast.protocol.layout import Layout
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import (
    WASTE_SHARE,
    Delta,
    DeltaFetch,
    FileReuse,
    Holding,
    Plan,
    ShardCopy,
    ShardFetch,
    network_share,
    plan_version,
    worth_switching,
)
from tests.unit.protocol.facts import KIB_256, A, B, C, D, layout

S = KIB_256
E = "e" * 64


def version(number: int, tree: Layout, *digests: str | None) -> Version:
    return Version(layout=tree, layout_digest=E, digests=digests, manifest=None, documents=())


TWO_FILES = layout([("a", 2 * S), ("none", 0), ("b", S)], version=2)
NEW = version(2, TWO_FILES, A, B, C)


def test_from_nothing_everything_is_fetched() -> None:
    plan = plan_version(NEW, [], [])
    assert plan.fetches == tuple(
        ShardFetch(digest, S, (TWO_FILES.extent(shard),)) for shard, digest in enumerate((A, B, C))
    )
    assert plan.fetch_bytes == 3 * S
    assert plan.done_bytes == 0
    assert not plan.files + plan.copies + plan.repeats + plan.unknown


def test_what_is_done_is_not_planned() -> None:
    plan = plan_version(NEW, [1, 0], [])
    assert [fetch.digest for fetch in plan.fetches] == [C]
    assert plan.done_bytes == 2 * S


def test_unchanged_files_and_shards_come_from_disk() -> None:
    before = layout([("old", 2 * S), ("c", 2 * S)], version=1)
    plan = plan_version(NEW, [], [Holding(version(1, before, A, B, D, C), [0, 1, 3])])
    assert plan.files == (FileReuse(0, 1, "old"),)
    assert plan.copies == (ShardCopy(TWO_FILES.extent(2), 1, before.extent(3)),)
    assert plan.fetches == ()


def test_a_file_that_is_partly_there_is_completed_by_shards() -> None:
    before = layout([("old", 2 * S)], version=1)
    plan = plan_version(NEW, [0], [Holding(version(1, before, A, B), {0, 1})])
    assert plan.files == ()
    assert plan.copies == (ShardCopy(TWO_FILES.extent(1), 1, before.extent(1)),)
    assert [fetch.digest for fetch in plan.fetches] == [C]


def test_only_verified_shards_are_sources() -> None:
    before = layout([("old", 2 * S)], version=1)
    plan = plan_version(NEW, [], [Holding(version(1, before, A, B), [1])])
    assert plan.files == ()
    assert [copy.source.shard for copy in plan.copies] == [1]
    assert [fetch.digest for fetch in plan.fetches] == [A, C]


def test_the_first_holding_wins() -> None:
    one = layout([("x", S)], version=3)
    two = layout([("y", S)], version=4)
    holdings = [Holding(version(3, one, C), [0]), Holding(version(4, two, C), [0])]
    plan = plan_version(NEW, [], holdings)
    assert plan.files == (FileReuse(2, 3, "x"),)


def test_a_digest_is_fetched_once_and_repeated() -> None:
    plan = plan_version(version(2, TWO_FILES, A, B, A), [], [])
    assert plan.fetches[0].targets == (TWO_FILES.extent(0), TWO_FILES.extent(2))
    assert plan.fetch_bytes == 2 * S
    done = plan_version(version(2, TWO_FILES, A, B, A), [0], [])
    assert done.repeats == (ShardCopy(TWO_FILES.extent(2), 2, TWO_FILES.extent(0)),)


def test_an_open_version_has_unknown_shards() -> None:
    before = layout([("old", 2 * S)], version=1)
    holding = Holding(version(1, before, A, None), [0, 1])
    plan = plan_version(version(2, TWO_FILES, A, None, None), [2], [holding])
    assert plan.unknown == (1,)
    assert [copy.source.shard for copy in plan.copies] == [0]
    assert plan.fetches == ()


def test_a_digest_of_another_length_is_no_source() -> None:
    """Two layouts of one run may lie differently about a digest; neither's bytes stand in."""
    short = layout([("old", 5)], version=1)
    plan = plan_version(NEW, [], [Holding(version(1, short, C), [0])])
    assert plan.files == ()
    assert plan.copies == ()
    assert [fetch.digest for fetch in plan.fetches] == [A, B, C]


def test_a_version_without_shards() -> None:
    plan = plan_version(version(2, layout([("a", 0)])), [], [Holding(NEW, [0, 1, 2])])
    assert not plan.files + plan.copies + plan.fetches + plan.repeats + plan.unknown


# --- deltas -----------------------------------------------------------------------------------


def blob(name: str, *frames: tuple[int, int]) -> DeltaBlob:
    return DeltaBlob(digest=name * 64, bytes=sum(size for _, size in frames), frames=list(frames))


def delta(base: int | None, *blobs: DeltaBlob, first: int = 0) -> Delta:
    part = DeltaPart(layout=E, base=D, codec="test", first_shard=first, blobs=list(blobs))
    return Delta(base, part)


BASE = version(1, layout([("a", 2 * S), ("b", S)], version=1), D, D, E)
ONE, TWO = blob("1", (1, 10), (1, 20)), blob("2", (1, 30))


def test_a_delta_replaces_the_shards_it_rebuilds() -> None:
    plan = plan_version(NEW, [], [Holding(BASE, [0, 1, 2])], [delta(1, ONE, TWO)])
    extents = [TWO_FILES.extent(shard) for shard in range(3)]
    assert plan.deltas == (
        DeltaFetch(1, ONE, 0, tuple(extents[:2])),
        DeltaFetch(1, TWO, 2, (extents[2],)),
    )
    assert (plan.fetches, plan.fetch_bytes) == ((), 60)


def test_verified_shards_of_an_unfinished_base_count() -> None:
    """Frame by frame: one whose base is not here is no reason to do without the blob."""
    plan = plan_version(NEW, [], [Holding(BASE, [0, 2])], [delta(1, ONE, TWO)])
    assert plan.deltas == (
        DeltaFetch(1, ONE, 0, (TWO_FILES.extent(0),)),
        DeltaFetch(1, TWO, 2, (TWO_FILES.extent(2),)),
    )
    assert [fetch.digest for fetch in plan.fetches] == [B]


@pytest.mark.parametrize(
    ("base", "verified"),
    [
        (version(1, layout([("other", 2 * S)], version=1), D, D), [0]),  # no such file
        (version(7, layout([("a", 2 * S)], version=7), D, D), [0, 1]),  # another version
        (version(1, layout([("a", 2 * S)], version=1), D, D), []),  # nothing of it
    ],
)
def test_a_delta_without_its_base_is_none(base: Version, verified: list[int]) -> None:
    plan = plan_version(NEW, [], [Holding(base, verified)], [delta(1, ONE)])
    assert not plan.deltas
    assert [fetch.digest for fetch in plan.fetches] == [A, B, C]


def test_frames_find_their_bytes_anywhere_in_a_whole_base() -> None:
    elsewhere = version(1, layout([("other", 2 * S)], version=1), D, D)
    plan = plan_version(NEW, [], [Holding(elsewhere, [0, 1])], [delta(1, ONE)])
    assert [fetch.blob for fetch in plan.deltas] == [ONE]


def test_a_base_may_be_cut_into_other_shards_and_be_shorter() -> None:
    finer = version(1, layout([("a", S + 5)], version=1, shard_bytes=S // 2), D, D, D)
    found = plan_version(NEW, [], [Holding(finer, [0, 1, 2])], [delta(1, ONE)])
    assert [fetch.blob for fetch in found.deltas] == [ONE]
    for verified, rebuilt in (([0, 2], [1]), ([0, 1], [0]), ([0], [])):
        found = plan_version(NEW, [], [Holding(finer, verified)], [delta(1, ONE)])
        assert [extent.shard for fetch in found.deltas for extent in fetch.targets] == rebuilt


def test_a_compressed_copy_needs_no_base() -> None:
    plan = plan_version(NEW, [0], [], [delta(None, ONE)])
    assert plan.deltas == (DeltaFetch(None, ONE, 0, (TWO_FILES.extent(1),)),)
    assert [fetch.digest for fetch in plan.fetches] == [C]


def test_a_delta_that_is_no_cheaper_is_not_used() -> None:
    held = [Holding(BASE, [0, 1, 2])]
    assert not plan_version(NEW, [0], held, [delta(1, blob("1", (1, S), (1, 1)))]).deltas
    assert not plan_version(NEW, [0, 1], held, [delta(1, ONE)]).deltas


def test_what_reaches_beyond_the_layout_is_not_used() -> None:
    held = [Holding(BASE, [0, 1, 2])]
    plan = plan_version(NEW, [], held, [delta(1, TWO, blob("3", (3, 1)), first=1)])
    assert [(fetch.blob, fetch.first_shard) for fetch in plan.deltas] == [(TWO, 1)]


def test_another_shard_with_a_rebuilt_digest_is_a_repeat() -> None:
    same = version(2, TWO_FILES, A, A, A)
    plan = plan_version(same, [], [Holding(BASE, [0, 1, 2])], [delta(1, TWO, first=0)])
    assert plan.deltas == (DeltaFetch(1, TWO, 0, (TWO_FILES.extent(0),)),)
    assert plan.repeats == (
        ShardCopy(TWO_FILES.extent(1), 2, TWO_FILES.extent(0)),
        ShardCopy(TWO_FILES.extent(2), 2, TWO_FILES.extent(0)),
    )
    assert not plan.fetches


# --- which version first ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "fresh", "wasted", "spent", "switch"),
    [
        (100, 100, 0, 0, True),  # nothing was here yet
        (100, 100, 10**9, 10**9, True),  # nothing more is wasted then, whatever was before
        (60, 60, 0, 40, True),  # all that was verified counts for the newer one, too
        (60, 1, 0, 40, True),
        (75, 100, 0, 25, True),  # a fifth of 125 is thrown away
        (74, 100, 0, 26, False),  # too much
        (90, 100, 14, 24, True),
        (90, 100, 15, 24, False),  # too much, with what was thrown away before
        (5, 6, 30, 195, True),  # each switch cost a little, most of what came counts still
        (0, 100, 0, 100, False),
        (0, 0, 0, 0, True),
    ],
)
def test_a_newer_version_wins_where_it_costs_little(
    left: int, fresh: int, wasted: int, spent: int, *, switch: bool
) -> None:
    assert WASTE_SHARE == 0.2
    assert worth_switching(left, fresh, wasted_bytes=wasted, spent_bytes=spent) is switch


def delta_of(shard: int, size: int) -> DeltaFetch:
    blob = DeltaBlob(digest=D, bytes=size, frames=[(1, size)])
    return DeltaFetch(1, blob, shard, (TWO_FILES.extent(shard),))


def test_what_the_network_brings_first() -> None:
    extents = [TWO_FILES.extent(shard) for shard in range(3)]
    plan = Plan(
        files=(FileReuse(0, 1, "old"),),
        copies=(ShardCopy(extents[2], 1, extents[2]),),
        deltas=(delta_of(0, 10), delta_of(1, 10)),
        fetches=(ShardFetch(A, S, (extents[0],)), ShardFetch(B, S, (extents[1],))),
        repeats=(ShardCopy(extents[2], 2, extents[0]), ShardCopy(extents[2], 2, extents[1])),
        unknown=(2,),
        done_bytes=7,
    )
    first = network_share(plan, 1, plain=True)
    assert first.deltas == plan.deltas[:1]  # a blob may be more
    assert first.fetches == ()
    assert first.repeats == plan.repeats[:1]  # of the shard that comes
    assert (first.files, first.copies) == ((), ())
    assert (first.unknown, first.done_bytes) == ((2,), 7)
    more = network_share(plan, 21, plain=True)
    assert more.deltas == plan.deltas
    assert more.fetches == plan.fetches[:1]
    assert network_share(plan, 3 * S, plain=True).fetches == plan.fetches
    assert network_share(plan, 3 * S, plain=False).fetches == ()
