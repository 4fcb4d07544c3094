"""Plans as values."""

from shardcast.protocol.layout import Layout
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import FileReuse, Holding, ShardCopy, ShardFetch, plan_version
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
