"""Descriptors of directories and journals: open while used, few of them after that."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from shardcast.errors import BusyError, DiskError
from shardcast.protocol.manifest import Version
from shardcast.store.descriptors import SHARED, DescriptorPool, PooledDescriptor, affordable
from shardcast.store.journal import ShardJournal, parse_journal
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, ShardState
from tests.unit.store.conftest import KIB, Sample, make_sample


def open_now() -> set[str]:
    """What the process has open, by the names it was opened with."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return names


def close_idle() -> None:
    """Close what the process has open and does not use, as a shortage would."""
    with SHARED.lock:
        SHARED.shed()


def pooled(path: Path, pool: DescriptorPool) -> PooledDescriptor:
    path.mkdir(exist_ok=True)
    return PooledDescriptor(lambda: os.open(path, os.O_RDONLY), pool)


def test_only_the_latest_stay_open(tmp_path: Path) -> None:
    pool = DescriptorPool(lambda: 2)
    names = [tmp_path / name for name in "abcd"]
    descriptors = [pooled(name, pool) for name in names]
    for descriptor in descriptors:
        with descriptor.use() as fd:
            assert os.fstat(fd).st_nlink
    assert {Path(name) for name in open_now()} & set(names) == set(names[2:])
    with descriptors[2].use():  # the latest again
        pass
    with descriptors[0].use() as fd:
        assert os.readlink(f"/proc/self/fd/{fd}") == str(names[0])
    assert {Path(name) for name in open_now()} & set(names) == {names[2], names[0]}
    assert [descriptor.opened for descriptor in descriptors] == [2, 1, 1, 1]
    for descriptor in descriptors:
        descriptor.close()
    assert {Path(name) for name in open_now()} & set(names) == set()
    assert pool.idle == 0


def test_what_is_in_use_is_never_closed(tmp_path: Path) -> None:
    pool = DescriptorPool(lambda: 0)
    descriptor = pooled(tmp_path / "a", pool)
    with descriptor.use() as outer:
        with descriptor.use() as inner:
            assert inner == outer
        descriptor.close()  # takes effect at the end
        assert os.fstat(outer)
    with pytest.raises(OSError, match="closed"), descriptor.use():
        pass
    assert str(tmp_path / "a") not in open_now()


def test_a_shortage_closes_what_is_idle_and_tries_again(tmp_path: Path) -> None:
    pool = DescriptorPool(lambda: 10)
    with pooled(tmp_path / "a", pool).use():
        pass
    refusals = [errno.EMFILE]

    def opener() -> int:
        if refusals:
            raise OSError(refusals.pop(), "no")
        return os.open(tmp_path, os.O_RDONLY)

    descriptor = PooledDescriptor(opener, pool)
    with descriptor.use():
        assert pool.idle == 0
    descriptor.close()
    for number in (errno.EACCES, errno.EMFILE):
        refusals += [number] * 2
        with pytest.raises(OSError, match="no"), PooledDescriptor(opener, pool).use():
            pass
        refusals.clear()


def test_a_share_of_the_limit_may_lie_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, most in [(256, 32), (64, 8), (before[1], 512)]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
            assert affordable() == min(most, max(8, limit // 8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# --- versions -----------------------------------------------------------------------------------


def test_a_staged_version_survives_losing_its_descriptors(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    stored = run.stage(sample.version)
    for shard in stored.missing():
        close_idle()
        sample.write_shard(stored, shard)
    close_idle()
    assert not [name for name in open_now() if name.startswith(str(run.root))]
    assert all(stored.confirm(shard) for shard in range(4))
    close_idle()
    run.commit(1, Durability.SYNC)
    close_idle()
    assert all(stored.confirm(shard) for shard in range(4))
    fd = stored.open_file(0)
    assert os.pread(fd, 600 * KIB, 0) == sample.files["a/model.safetensors"]
    os.close(fd)
    journal = (run.root / "state" / "000001.shards").read_bytes()
    assert set(parse_journal(journal, sample.version.layout_digest, 4) or {}) == set(range(4))


def test_the_directory_is_found_while_it_is_renamed(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sample.fill(run)
    real, seen = os.rename, []

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        close_idle()
        fd = stored.open_file(1)  # between the rename and what remembers it
        seen.append(os.pread(fd, 100, 0))
        os.close(fd)

    monkeypatch.setattr(os, "rename", rename)
    run.commit(1, Durability.NONE)
    assert seen == [sample.files["config.json"]]


def test_a_lease_holds_its_directory_open(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    with stored.lease():
        close_idle()
        assert str(stored.directory) in open_now()
        assert not RunStore(run.root, run.run).evict(1)
    close_idle()
    assert str(stored.directory) not in open_now()
    assert run.evict(1)


def test_another_directory_of_the_same_name_is_not_taken_for_it(
    run: RunStore, sample: Sample
) -> None:
    sample.fill(run)
    stored = run.commit(1)
    stored.directory.rename(run.root / "aside")
    close_idle()
    stored.directory.mkdir()
    (stored.directory / "config.json").write_bytes(sample.files["config.json"])
    assert not stored.alive
    with pytest.raises(DiskError):
        stored.open_file(1)
    with pytest.raises(BusyError, match="evicted"):
        stored.acquire_lease()
    assert not stored.confirm(0)


def test_a_staged_version_is_looked_at_again_after_its_directory_was_closed(
    run: RunStore, sample: Sample
) -> None:
    """Its files have no stamps; and who knows what lies there now under the same inode number."""
    stored = sample.fill(run)
    assert stored.confirm(0)
    close_idle()
    extent = sample.version.layout.extent(0)
    with open(stored.directory / extent.path, "r+b") as file:
        file.write(b"?" * 100)
    os.close(stored.open_file(0))
    assert not stored.confirm(0)
    assert stored.confirm(1)
    assert stored.state(1) is ShardState.VERIFIED


def test_a_shortage_says_nothing_about_a_file(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    close_idle()
    with no_descriptors(), pytest.raises(DiskError, match="Too many open files"):
        stored.confirm(0)
    assert stored.damaged is None
    assert stored.confirm(0)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Take every descriptor that the process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while len(held) <= before[0]:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_versions_do_not_need_many_descriptors(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    base = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    runs = [RunStore(tmp_path / str(number), "test") for number in range(150)]
    try:
        for run in runs:
            for number in (1, 2):
                sample = make_sample(number, {"a": b"%d" % number})
                sample.fill(run)
                if number == 1:
                    run.commit(1, Durability.NONE)
        assert len(os.listdir("/proc/self/fd")) <= base + affordable() + 1
        assert all(_whole(run, number) for run in runs for number in (1, 2))
    finally:
        for run in runs:
            run.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not [name for name in open_now() if name.startswith(str(tmp_path))]


def _whole(run: RunStore, number: int) -> bool:
    stored = run.stored(number)
    return stored is not None and stored.complete and stored.confirm(0)


def test_a_journal_is_written_on_where_it_ended(tmp_path: Path, sample: Sample) -> None:
    version: Version = sample.version
    journal = ShardJournal(tmp_path / "j", version.layout_digest, 4)
    entries = {shard: xxhash.xxh3_128_digest(b"%d" % shard) for shard in range(4)}
    for shard, xxh3 in entries.items():
        journal.append(shard, xxh3)
        close_idle()
    journal.sync()
    journal.close()
    assert parse_journal((tmp_path / "j").read_bytes(), version.layout_digest, 4) == entries


def test_without_descriptors_nothing_that_is_read_counts_as_evicted(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its description and journal were removed, and it was lost under its readers."""
    sample.fill(run)
    stored = run.commit(1)
    real = os.open

    def none_left(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if Path(path) == stored.directory:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, mode, dir_fd=dir_fd)

    with stored.lease():
        monkeypatch.setattr(os, "open", none_left)
        assert not run.evict(1)
        monkeypatch.undo()
        assert run.state_path(1).exists()
        assert run.stored(1) is stored
        assert stored.complete


def test_who_still_reads_the_object_of_another_writer_keeps_no_removed_version_open(
    run: RunStore, sample: Sample
) -> None:
    """A relay that took over has one object for a version until it may write, and then another."""
    sample.fill(run)
    run.commit(1, Durability.NONE)
    run.close()
    reader = RunStore(run.root, run.run)
    reader.set_writer(False)
    old = reader.stored(1)
    assert old is not None
    reader.set_writer(True)
    os.close(old.open_file(0))  # a request that had it in hand
    new = reader.stored(1)
    assert new is not None
    assert new is not old
    assert reader.evict(1)
    reader.forget_gone()
    assert not [name for name in all_open() if name.startswith(str(run.root / "state" / "trash"))]
    reader.close()


def all_open() -> list[str]:
    """What the process has open, once for each descriptor."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names
