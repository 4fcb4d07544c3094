"""What holds for every plan."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.protocol.delta import DeltaBlob, DeltaPart
from shardcast.protocol.layout import FileEntry, Layout
from shardcast.protocol.manifest import Version
from shardcast.protocol.plan import Delta, Holding, plan_version, worth_switching

S = 262144
sizes = st.sampled_from([0, 1, S - 1, S, S + 1, 2 * S, 3 * S])


@st.composite
def versions(draw: st.DrawFn, number: int) -> Version:
    """A version over few contents, so that repeats are common; equal digests, equal lengths."""
    files = [
        FileEntry(path=f"f{i}", bytes=size)
        for i, size in enumerate(draw(st.lists(sizes, min_size=1, max_size=4)))
    ]
    layout = Layout(
        run="demo",
        version=number,
        step=None,
        lineage="",
        created_at=0,
        shard_bytes=S,
        metadata={},
        files=files,
    )
    digests = [f"{draw(st.integers(0, 3)):032x}{extent.length:032x}" for extent in layout.extents()]
    known = draw(st.lists(st.booleans() | st.just(True), min_size=len(digests)))
    return Version(
        layout=layout,
        layout_digest="0" * 64,
        digests=tuple(d if k else None for d, k in zip(digests, known, strict=False)),
        manifest=None,
        documents=(),
    )


@st.composite
def some_shards(draw: st.DrawFn, version: Version) -> list[int]:
    known = [shard for shard, digest in enumerate(version.digests) if digest is not None]
    return draw(st.lists(st.sampled_from(known), unique=True)) if known else []


@st.composite
def situations(draw: st.DrawFn) -> tuple[Version, list[int], list[Holding]]:
    target = draw(versions(9))
    held = [draw(versions(number)) for number in range(draw(st.integers(0, 3)))]
    return (
        target,
        draw(some_shards(target)),
        [Holding(version, draw(some_shards(version))) for version in held],
    )


@st.composite
def some_deltas(draw: st.DrawFn) -> list[Delta]:
    """Deltas from bases that are held, or not, or none; some reach beyond the target."""
    found = []
    for number in range(draw(st.integers(0, 3))):
        blobs = []
        for index in range(draw(st.integers(1, 3))):
            frames = [(count, draw(st.integers(1, S))) for count in draw(counts)]
            size = sum(length for _, length in frames)
            blobs.append(DeltaBlob(digest=f"{number:032x}{index:032x}", bytes=size, frames=frames))
        part = DeltaPart(
            layout="0" * 64,
            base="1" * 64,
            codec="test",
            first_shard=draw(st.integers(0, 4)),
            blobs=blobs,
        )
        found.append(Delta(draw(st.sampled_from([None, 0, 1, 2, 77])), part))
    return found


counts = st.lists(st.integers(1, 3), min_size=1, max_size=2)


@given(situation=situations(), deltas=some_deltas())
@settings(max_examples=300)
def test_every_shard_is_planned_exactly_once(
    situation: tuple[Version, list[int], list[Holding]], deltas: list[Delta]
) -> None:
    target, done, holdings = situation
    plan = plan_version(target, done, holdings, deltas)
    planned = Counter(done)
    planned.update(extent.shard for fetch in plan.deltas for extent in fetch.targets)
    for reuse in plan.files:
        planned.update(target.layout.file_shards(reuse.file))
    planned.update(copy.target.shard for copy in plan.copies)
    planned.update(extent.shard for fetch in plan.fetches for extent in fetch.targets)
    planned.update(repeat.target.shard for repeat in plan.repeats)
    planned.update(plan.unknown)
    assert planned == Counter(range(target.layout.shard_count))


@given(situation=situations())
@settings(max_examples=300)
def test_every_source_has_the_bytes(situation: tuple[Version, list[int], list[Holding]]) -> None:
    target, done, holdings = situation
    plan = plan_version(target, done, holdings)
    held = {h.version.number: h for h in holdings} | {target.number: Holding(target, done)}
    assert not plan.deltas
    for copy in (*plan.copies, *plan.repeats):
        source = held[copy.source_version]
        assert copy.source.shard in source.verified
        assert source.version.layout.extent(copy.source.shard) == copy.source
        assert source.version.digests[copy.source.shard] == target.digests[copy.target.shard]
        assert copy.source.length == copy.target.length
    assert all(repeat.source_version == target.number for repeat in plan.repeats)
    for reuse in plan.files:
        version = held[reuse.source_version].version
        file = [entry.path for entry in version.layout.files].index(reuse.source_path)
        assert version.layout.files[file].bytes == target.layout.files[reuse.file].bytes
        ours, theirs = target.layout.file_shards(reuse.file), version.layout.file_shards(file)
        assert set(theirs) <= set(held[reuse.source_version].verified)
        assert [target.digests[i] for i in ours] == [version.digests[i] for i in theirs]


@given(situation=situations())
@settings(max_examples=300)
def test_fetches(situation: tuple[Version, list[int], list[Holding]]) -> None:
    """Each digest once, never one that is here, and the bytes add up."""
    target, done, holdings = situation
    plan = plan_version(target, done, holdings)
    fetched = [fetch.digest for fetch in plan.fetches]
    assert len(set(fetched)) == len(fetched)
    here = {target.digests[shard] for shard in done}
    here |= {h.version.digests[shard] for h in holdings for shard in h.verified}
    assert here.isdisjoint(fetched)
    for fetch in plan.fetches:
        assert {extent.length for extent in fetch.targets} == {fetch.length}
        assert all(target.digests[extent.shard] == fetch.digest for extent in fetch.targets)
    assert plan.fetch_bytes == sum(fetch.length for fetch in plan.fetches)
    assert plan.done_bytes == sum(target.layout.extent(shard).length for shard in done)
    assert all(target.digests[shard] is None for shard in plan.unknown)


@given(situation=situations(), deltas=some_deltas())
@settings(max_examples=300)
def test_deltas_only_ever_save(
    situation: tuple[Version, list[int], list[Holding]], deltas: list[Delta]
) -> None:
    """Each is cheaper than what it rebuilds, and starts from something that is held, or nothing."""
    target, done, holdings = situation
    plan = plan_version(target, done, holdings, deltas)
    assert plan.fetch_bytes <= plan_version(target, done, holdings).fetch_bytes
    held = {holding.version.number for holding in holdings}
    for fetch in plan.deltas:
        rebuilt = {target.digests[e.shard]: e.length for e in fetch.targets}
        assert fetch.blob.bytes < sum(rebuilt.values())
        assert fetch.base is None or fetch.base in held
        count = sum(shards for shards, _ in fetch.blob.frames)
        assert {e.shard for e in fetch.targets} <= set(
            range(fetch.first_shard, fetch.first_shard + count)
        )
    assert all(
        repeat.source.shard in done or repeat.source in [e for f in plan.deltas for e in f.targets]
        for repeat in plan.repeats
    )


sizes_of_work = st.integers(0, 10**13)


@given(
    left=sizes_of_work,
    fresh=sizes_of_work,
    more=st.integers(0, 10**6),
    wasted=sizes_of_work,
    spent=sizes_of_work,
)
def test_what_is_nearly_done_is_never_dropped_sooner(
    left: int, fresh: int, more: int, wasted: int, spent: int
) -> None:
    """Who would stay still stays with more behind it, and who wasted more does not switch sooner."""
    if not worth_switching(left, fresh, wasted_bytes=wasted, spent_bytes=spent):
        nearer = max(left - more, 0)
        assert not worth_switching(nearer, fresh, wasted_bytes=wasted, spent_bytes=spent)
        assert not worth_switching(left, fresh, wasted_bytes=wasted + more, spent_bytes=spent)


@given(amounts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=50))
def test_a_version_is_reached_within_a_quarter_more_than_a_copy(
    amounts: list[tuple[float, float]],
) -> None:
    """Whenever newer versions come, and whatever part of the older one counts for them."""
    size = 10**9
    here = spent = wasted = 0
    for fetched, counts in amounts:
        now = int((size - here) * fetched)
        here, spent = here + now, spent + now
        if here == size:
            break
        left, fresh = size - here, size - int(here * counts)
        if worth_switching(left, fresh, wasted_bytes=wasted, spent_bytes=spent):
            wasted += fresh - left
            here = size - fresh
    assert spent + size - here <= 1.25 * size + 1


@given(target=versions(1))
def test_without_a_holding_everything_is_fetched(target: Version) -> None:
    plan = plan_version(target, [], [])
    assert not plan.files + plan.copies + plan.repeats
    targets = sum(len(fetch.targets) for fetch in plan.fetches)
    assert targets + len(plan.unknown) == target.layout.shard_count
    assert {fetch.digest for fetch in plan.fetches} == {d for d in target.digests if d}


@given(target=versions(1))
def test_shards_fill_the_files(target: Version) -> None:
    """Extents are the files, cut, in order: no byte left out or named twice."""
    layout = target.layout
    for file, entry in enumerate(layout.files):
        at = 0
        for shard in layout.file_shards(file):
            extent = layout.extent(shard)
            assert (extent.shard, extent.file, extent.path) == (shard, file, entry.path)
            assert (extent.offset, 0 < extent.length <= S) == (at, True)
            at += extent.length
        assert at == entry.bytes
