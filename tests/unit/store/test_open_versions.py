"""Open versions on disk: read beside the process that writes them, and closed with other digests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import xxhash

from shardcast.protocol.digest import digest_of
from shardcast.protocol.manifest import Version
from shardcast.store.files import write_all
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, ShardState, StoredVersion
from shardcast.store.version_files import make_files
from tests.unit.store.conftest import Sample

OTHER = digest_of(b"something else")


def opened(sample: Sample, *shards: int, parts: tuple[str, ...] = ()) -> Version:
    """The version while it streams: the digests of these shards are known."""
    digests = sample.version.digests
    return replace(
        sample.version,
        manifest=None,
        digests=tuple(d if n in shards else None for n, d in enumerate(digests)),
        documents=(sample.version.layout_digest, *parts),
    )


def begun(run: RunStore, sample: Sample) -> StoredVersion:
    sample.write_documents(run)
    make_files(sample.version, run.staging_directory(1))
    return run.begin(opened(sample))


def journal_of(run: RunStore) -> bytes:
    return (run.root / "state" / "000001.shards").read_bytes()


def test_what_a_publisher_records_is_read_beside_it_as_far_as_parts_name_it(
    run: RunStore, sample: Sample
) -> None:
    writing = begun(run, sample)
    reader = RunStore(run.root, run.run)
    assert reader.stored(1) is None  # nothing describes it
    sample.write_shard(writing, 0)
    sample.write_shard(writing, 1)
    here = reader.followed(opened(sample, 0))
    assert here is not None
    assert here.present() == {0}
    assert here.confirm(0)
    sample.write_shard(writing, 2)
    again = reader.followed(opened(sample, 0, 1, 2, parts=("a" * 64,)))
    assert again is here
    assert here.present() == {0, 1, 2}
    assert here.state(0) is ShardState.VERIFIED  # not hashed again
    assert not reader.state_path(1).exists()


def test_a_reader_never_writes_to_the_journal_of_the_publisher(
    run: RunStore, sample: Sample
) -> None:
    writing = begun(run, sample)
    sample.write_shard(writing, 0)
    reader = RunStore(run.root, run.run)
    here = reader.followed(opened(sample, 0))
    assert here is not None
    sample.write_shard(writing, 1)
    before = journal_of(run)
    fd = os.open(run.staging_directory(1) / sample.version.layout.extent(0).path, os.O_WRONLY)
    write_all(fd, memoryview(b"rot"), 0)
    os.close(fd)
    assert not here.confirm(0)
    assert journal_of(run) == before
    assert here.state(0) is ShardState.MISSING


def test_a_version_that_is_committed_beside_its_reader_stays_readable(
    run: RunStore, sample: Sample
) -> None:
    writing = begun(run, sample)
    reader = RunStore(run.root, run.run)
    for shard in range(sample.version.layout.shard_count):
        sample.write_shard(writing, shard)
    everything = range(sample.version.layout.shard_count)
    here = reader.followed(opened(sample, *everything))
    assert here is not None
    assert run.stage(sample.version, files=False) is writing
    run.commit(1, Durability.NONE)
    assert here.alive
    with here.lease():
        os.close(here.open_file(0))
    stored = reader.stored(1)
    assert stored is not None
    assert stored.committed
    assert stored.complete


def test_a_version_that_was_given_up_is_let_go(run: RunStore, sample: Sample) -> None:
    begun(run, sample)
    reader = RunStore(run.root, run.run)
    here = reader.followed(opened(sample))
    assert here is not None
    assert run.evict(1)
    reader.forget_gone()
    assert not here.alive
    assert reader.followed(opened(sample)) is None


def test_a_version_that_somebody_describes_is_not_followed(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    run.stage(opened(sample))
    assert RunStore(run.root, run.run).followed(opened(sample)) is None


def test_a_shard_whose_digest_changes_is_missing_also_after_a_restart(
    run: RunStore, sample: Sample
) -> None:
    """An open part that lied: what was verified against it is not what the version closes with."""
    sample.write_documents(run)
    lie = opened(sample, 0, 1)
    lie = replace(lie, digests=(OTHER, *lie.digests[1:]))
    stored = run.stage(lie)
    for shard in (0, 1):
        sample.write_shard(stored, shard)
    stored.update(sample.version)
    assert stored.present() == {1}
    again = RunStore(run.root, run.run)
    again.save_state(sample.version)
    found = again.stored(1)
    assert found is not None
    assert found.present() == {1}


def test_who_is_behind_takes_nothing_back(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    stored = run.stage(opened(sample, 0, 1, parts=("a" * 64, "b" * 64)))
    sample.write_shard(stored, 1)
    stored.update(opened(sample, 0, parts=("a" * 64,)))
    assert stored.version.digests[1] is not None
    assert stored.present() == {1}
    stored.update(sample.version)
    stored.update(opened(sample, 0, 1, parts=("a" * 64, "b" * 64)))
    assert stored.version.complete


def test_a_record_of_a_shard_that_no_part_names_counts_for_nothing(
    run: RunStore, sample: Sample
) -> None:
    sample.write_documents(run)
    part = sample.version.documents[2]
    stored = run.stage(opened(sample, 0, 1, 2, 3, parts=(part,)))
    sample.write_shard(stored, 0)
    run.remove_blob(part)
    found = RunStore(run.root, run.run).stored(1)
    assert found is not None
    assert not found.present()
    sample.write_documents(run)
    found = RunStore(run.root, run.run).stored(1)
    assert found is not None
    assert found.recorded(0) == xxhash.xxh3_128_digest(sample.shard(0))


def test_a_journal_that_is_not_there_yet_names_nothing(
    run: RunStore, sample: Sample, tmp_path: Path
) -> None:
    begun(run, sample)
    reader = RunStore(run.root, run.run)
    here = reader.followed(opened(sample, 0))
    assert here is not None
    assert not here.present()
    assert not (tmp_path / "test" / "state" / "000001.shards").exists()
