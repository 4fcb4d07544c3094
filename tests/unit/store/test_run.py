"""A run's directory: documents, staging, resume, commit, eviction."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from shardcast.errors import (
    BusyError,
    DiskError,
    DiskFullError,
    IntegrityError,
    MalformedError,
    MixAndMatchError,
    NotFoundError,
    StateError,
)
from shardcast.protocol import trust
from shardcast.protocol.head import OpenRef
from shardcast.protocol.layout import FileEntry
from shardcast.store.files import write_all
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.store.stored import Durability, ShardState, StoredVersion
from tests.unit.store.conftest import KIB, Sample, make_sample

KEY = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def reopened(run: RunStore) -> RunStore:
    return RunStore(run.root, run.run)


def now(stored: StoredVersion, attribute: str) -> bool:
    """Read a property that changes; a direct read would be narrowed by the type checker."""
    return bool(getattr(stored, attribute))


def damage(path: Path, offset: int, data: bytes) -> None:
    """Change bytes without changing the mtime, as a bad disk does."""
    info = path.stat()
    fd = os.open(path, os.O_WRONLY)
    write_all(fd, memoryview(data), offset)
    os.close(fd)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


# --- documents -------------------------------------------------------------------------------


def test_blobs_are_verified_when_written_and_when_read(run: RunStore, sample: Sample) -> None:
    digest, data = next(iter(sample.blobs.items()))
    with pytest.raises(IntegrityError, match=f"not {digest}"):
        run.write_blob(digest, data + b" ")
    assert run.read_blob(digest) is None
    run.write_blob(digest, data)
    run.write_blob(digest, data)
    assert run.read_blob(digest) == data
    assert run.blobs() == [digest]
    run.blob_path(digest).write_bytes(data[:-1])
    assert run.read_blob(digest) is None
    assert not run.has_blob(digest)  # removed, so that it is fetched again


def test_an_oversized_blob_file_is_not_read_into_memory(run: RunStore, sample: Sample) -> None:
    digest, data = next(iter(sample.blobs.items()))
    run.write_blob(digest, data)
    assert run.read_blob(digest, limit=len(data)) == data
    assert run.read_blob(digest, limit=len(data) - 1) is None


def test_a_temporary_file_becomes_a_blob(run: RunStore, sample: Sample) -> None:
    digest, data = next(iter(sample.blobs.items()))
    path = run.temporary(digest)
    assert path != run.temporary(digest)
    path.write_bytes(data)
    run.keep_blob(digest, path)
    assert run.read_blob(digest) == data
    assert not path.exists()


def test_a_version_is_assembled_from_blobs_or_is_not_there(run: RunStore, sample: Sample) -> None:
    for digest, data in sample.blobs.items():
        assert run.load_version(sample.ref) is None
        run.write_blob(digest, data)
    assert run.load_version(sample.ref) == sample.version
    with pytest.raises(MixAndMatchError, match="head says 5 bytes"):
        run.load_version(msgspec.structs.replace(sample.ref, bytes=5))


def test_an_open_version_is_assembled_with_the_parts_that_are_here(
    run: RunStore, sample: Sample
) -> None:
    manifest, layout, part = sample.version.documents
    ref = OpenRef(version=1, step=10, layout=layout, parts=[part], deltas=[])
    assert run.load_open(ref) is None
    run.write_blob(layout, sample.blobs[layout])
    without = run.load_open(ref)
    assert without is not None
    assert set(without.digests) == {None}
    run.write_blob(part, sample.blobs[part])
    opened = run.load_open(ref)
    assert opened is not None
    assert opened.digests == sample.version.digests
    assert not opened.complete

    stored = run.stage(opened)
    for shard in stored.missing():
        sample.write_shard(stored, shard)
    assert not now(stored, "complete")  # no manifest pins it yet
    run.write_blob(manifest, sample.blobs[manifest])
    assert run.stage(sample.version) is stored
    assert now(stored, "complete")
    again = reopened(run).stored(1)
    assert again is not None
    assert again.version == sample.version
    assert run.stage(opened) is stored  # somebody who is behind does not open it again
    assert now(stored, "complete")
    last = reopened(run).stored(1)
    assert last is not None
    assert last.version == sample.version
    with pytest.raises(StateError, match="another layout"):
        stored.update(make_sample(created_at=2).version)


def test_an_open_version_is_found_again_after_a_restart(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    _, layout, part = sample.version.documents
    opened = run.load_open(OpenRef(version=1, step=10, layout=layout, parts=[part], deltas=[]))
    assert opened is not None
    sample.write_shard(run.stage(opened), 1)
    again = reopened(run).stored(1)
    assert again is not None
    assert again.version == opened
    assert again.present() == {1}


# --- staging and resume ----------------------------------------------------------------------


def test_staged_files_have_their_full_size_at_once(run: RunStore, sample: Sample) -> None:
    stored = run.stage(sample.version)
    assert not stored.committed
    for entry in sample.version.layout.files:
        assert (stored.directory / entry.path).stat().st_size == entry.bytes
    assert stored.missing() == [0, 1, 2, 3]
    assert run.staged() == [1]
    assert run.committed() == []


def test_resume_trusts_only_shards_whose_bytes_still_have_the_recorded_hash(
    run: RunStore, sample: Sample
) -> None:
    sample.write_documents(run)
    stored = run.stage(sample.version)
    for shard in (0, 1, 3):
        sample.write_shard(stored, shard)
    damage(stored.directory / "a/model.safetensors", 10, b"\0\0\0\0")
    again = reopened(run).stage(sample.version)
    assert [again.state(shard) for shard in range(4)] == [
        ShardState.RECORDED,
        ShardState.RECORDED,
        ShardState.MISSING,
        ShardState.RECORDED,
    ]
    assert [again.confirm(shard) for shard in range(4)] == [False, True, False, True]
    assert again.missing() == [0, 2]
    assert again.state(1) is ShardState.VERIFIED
    assert reopened(run).stage(sample.version).missing() == [0, 2]  # that was remembered


@pytest.mark.parametrize("kind", ["zeroed", "truncated", "garbage", "other version", "removed"])
def test_a_damaged_journal_costs_work_but_never_a_wrong_shard(
    run: RunStore, sample: Sample, kind: str
) -> None:
    sample.fill(run)
    run.close()
    path = run.root / "state" / "000001.shards"
    data = path.read_bytes()
    if kind == "zeroed":
        path.write_bytes(bytes(len(data)))
    elif kind == "truncated":
        path.write_bytes(data[: len(data) - 30])
    elif kind == "garbage":
        path.write_bytes(os.urandom(len(data)))
    elif kind == "other version":
        path.write_bytes(data[:8] + os.urandom(32) + data[40:])
    else:
        path.unlink()
    again = reopened(run).stage(sample.version)
    good = {shard for shard in range(4) if again.confirm(shard)}
    assert good == ({0, 1} if kind == "truncated" else set())
    for shard in again.missing():
        sample.write_shard(again, shard)
    run2 = reopened(run)
    last = run2.stage(sample.version)
    assert all(last.confirm(shard) for shard in range(4))


def test_a_journal_record_out_of_range_or_with_a_flipped_bit_is_passed_over(
    run: RunStore, sample: Sample
) -> None:
    stored = sample.fill(run)
    run.close()
    path = run.root / "state" / "000001.shards"
    data = bytearray(path.read_bytes())
    data[40 + 24 + 9] ^= 1  # in the second record
    path.write_bytes(bytes(data))
    again = reopened(run).stage(sample.version)
    assert again.missing() == [1]
    assert stored.version == again.version


def test_another_layout_under_a_staged_number_starts_afresh(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    other = make_sample(1, created_at=2)
    other.write_documents(run)
    stored = run.stage(other.version)
    assert stored.missing() == [0, 1, 2, 3]


def test_a_staged_file_that_lost_its_size_is_made_again(run: RunStore, sample: Sample) -> None:
    stored = sample.fill(run)
    os.truncate(stored.directory / "a/model.safetensors", 5)
    (stored.directory / "config.json").unlink()
    again = reopened(run).stage(sample.version)
    assert not any(again.confirm(shard) for shard in range(4))


def test_no_room_is_said_before_anything_is_staged(run: RunStore) -> None:
    sample = make_sample(1, {"a": b"x"})
    layout = sample.version.layout
    big = msgspec.structs.replace(layout, files=[FileEntry(path="a", bytes=1 << 45)])
    version = replace(sample.version, layout=big, digests=(None,))
    with pytest.raises(DiskFullError, match=r"version 1 of run 'test' needs 35184372088832 bytes"):
        run.stage(version)


# --- commit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", list(Durability))
def test_commit_renames_a_complete_version_and_open_descriptors_survive(
    run: RunStore, sample: Sample, durability: Durability
) -> None:
    stored = sample.fill(run)
    fd = stored.open_file(0)
    committed = run.commit(1, durability)
    assert committed is stored
    assert stored.committed
    assert stored.directory == run.root / "versions" / "000001"
    assert os.pread(fd, 600 * KIB, 0) == sample.files["a/model.safetensors"]
    os.close(fd)
    fd = stored.open_file(0)
    assert os.fstat(fd).st_size == 600 * KIB
    os.close(fd)
    assert (run.committed(), run.staged()) == ([1], [])
    assert all(stored.confirm(shard) for shard in range(4))
    assert run.commit(1, durability) is stored
    run.switch_current(1)
    assert run.current() == 1
    assert os.readlink(run.root / "current") == "versions/000001"


def test_an_incomplete_version_is_never_committed(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    stored = run.stage(sample.version)
    sample.write_shard(stored, 0)
    with pytest.raises(IntegrityError, match="lacks 3 shards"):
        run.commit(1)
    with pytest.raises(NotFoundError, match="version 9 is not on disk"):
        run.commit(9)
    assert run.committed() == []


def test_a_taken_name_is_not_replaced(run: RunStore, sample: Sample) -> None:
    stored = sample.fill(run)
    run.version_directory(1).mkdir(parents=True)
    with pytest.raises(StateError, match="already there"):
        stored.commit_to(run.version_directory(1), Durability.NONE)


def test_another_layout_under_a_committed_number_is_refused(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    other = make_sample(1, created_at=2)
    other.write_documents(run)
    with pytest.raises(StateError, match="the publisher's has"):
        run.stage(other.version)


@pytest.mark.parametrize("kind", ["bit flip", "touched", "truncated", "removed", "appended"])
def test_a_committed_file_that_changes_is_noticed(run: RunStore, sample: Sample, kind: str) -> None:
    sample.fill(run)
    stored = run.commit(1)
    path = stored.directory / "a/model.safetensors"
    if kind == "bit flip":
        with open(path, "r+b") as file:
            file.seek(300 * KIB)
            file.write(bytes([sample.files["a/model.safetensors"][300 * KIB] ^ 1]))
    elif kind == "touched":
        os.utime(path)
    elif kind == "truncated":
        os.truncate(path, 300 * KIB)
    elif kind == "removed":
        path.unlink()
    else:
        with open(path, "ab") as file:
            file.write(b"more")
    good = [stored.confirm(shard) for shard in range(4)]
    expected = {
        "bit flip": [True, False, True, True],
        "touched": [True] * 4,
        "truncated": [True, False, False, True],
        "removed": [False, False, False, True],
        "appended": [True] * 4,
    }[kind]
    assert good == expected
    assert (stored.damaged is None) == (kind == "touched")
    assert now(stored, "complete") == all(expected)
    again = RunStore(run.root, "test").stored(1)
    assert again is not None
    assert (again.damaged is None) == (kind == "touched")
    again.restore_files()
    assert (again.damaged is None) == all(expected)
    assert path.stat().st_size == len(sample.files["a/model.safetensors"])


def test_a_flip_on_disk_is_found_by_the_next_process(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    damage(stored.directory / "a/model.safetensors", 0, b"\xff\xfe")
    again = reopened(run).stored(1)
    assert again is not None
    assert now(again, "complete")
    assert not again.confirm(0)
    assert not now(again, "complete")
    assert "shard 0: its bytes on disk changed" in (again.damaged or "")


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_an_error_of_the_system_says_nothing_about_the_bytes(
    run: RunStore, sample: Sample, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sample.fill(run)
    run.commit(1)
    stored = reopened(run).stored(1)
    assert stored is not None

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(DiskError, match=os.strerror(number)):
            stored.confirm(0)
    assert stored.damaged is None
    assert stored.confirm(0)


def test_a_damaged_committed_version_can_be_repaired_without_touching_a_linked_twin(
    run: RunStore, sample: Sample, tmp_path: Path
) -> None:
    sample.fill(run)
    stored = run.commit(1)
    path = stored.directory / "a/model.safetensors"
    damage(path, 0, b"\xff\xfe")
    twin = tmp_path / "twin"
    os.link(path, twin)
    stored = reopened(run).stored(1) or stored
    assert not stored.confirm(0)
    sample.write_shard(stored, 0)
    assert stored.damaged is None
    assert all(stored.confirm(shard) for shard in range(4))
    assert path.read_bytes() == sample.files["a/model.safetensors"]
    assert twin.read_bytes()[:2] == b"\xff\xfe"


# --- leases and eviction ---------------------------------------------------------------------


def test_a_lease_keeps_a_version_from_every_evictor(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    with stored.lease(), stored.lease():
        assert now(stored, "leased")
        assert not run.evict(1)
        assert not reopened(run).evict(1)
    assert not now(stored, "leased")
    fd = stored.open_file(0)
    assert run.evict(1)
    assert len(os.pread(fd, 600 * KIB, 0)) == 600 * KIB  # an open file stays readable
    os.close(fd)
    assert run.stored(1) is None
    assert run.committed() == []
    with pytest.raises(DiskError):
        stored.open_file(0)


def test_a_version_that_is_being_evicted_gives_no_lease(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    fd = os.open(stored.directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match="being evicted"), stored.lease():
        pass
    os.close(fd)


def test_current_is_never_evicted(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    run.switch_current(1)
    assert not run.evict(1)
    assert run.evict(7)  # not there: nothing to do


def test_eviction_by_another_process_is_noticed(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    stored = run.commit(1)
    assert now(stored, "alive")
    assert reopened(run).evict(1)
    assert not now(stored, "alive")
    assert run.stored(1) is None


def test_a_staged_version_can_be_evicted(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    assert run.evict(1)
    assert run.staged() == []
    assert os.listdir(run.root / "state" / "trash") == []


def test_leftovers_of_a_crash_are_removed(run: RunStore) -> None:
    trash = run.root / "state" / "trash" / "1.2.3"
    trash.mkdir(parents=True)
    (trash / "file").write_bytes(b"x")
    old, new = run.temporary("old"), run.temporary("new")
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    run.clean_leftovers()
    assert not trash.exists()
    assert not old.exists()
    assert new.exists()


# --- head, trust, store ----------------------------------------------------------------------


def test_head_and_trust_survive_a_restart(run: RunStore) -> None:
    assert (run.read_head(), run.read_trust(), run.head_stamp()) == (None, None, None)
    run.write_head(b"one")
    stamp = run.head_stamp()
    run.write_head(b"two")
    assert run.head_stamp() != stamp
    run.write_trust(trust.fresh("test", [KEY]))
    again = reopened(run)
    assert again.read_head() == b"two"
    assert again.read_trust() == trust.fresh("test", [KEY])


def test_damaged_trust_is_not_silently_forgotten(run: RunStore) -> None:
    run.write_trust(trust.fresh("test"))
    path = run.root / "state" / "trust.json"
    path.write_bytes(b"{}")
    with pytest.raises(StateError, match="remembered trust is damaged"):
        run.read_trust()
    path.write_bytes(trust.encode_state(trust.fresh("other")))
    with pytest.raises(StateError, match="belongs to run 'other'"):
        run.read_trust()


def test_an_oversized_head_file_is_a_state_error(run: RunStore) -> None:
    run.write_head(bytes(1024 * KIB + 1))
    with pytest.raises(StateError, match="longer than 1048576 bytes"):
        run.read_head()


def test_a_damaged_state_file_means_the_version_is_not_there(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    (run.root / "state" / "000001.json").write_bytes(b"\0" * 100)
    assert reopened(run).stored(1) is None
    run.remove_blob(sample.version.layout_digest)
    assert reopened(run).stored(1) is None


def test_a_store_lists_runs_and_keeps_its_node_id(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.runs() == []
    with pytest.raises(NotFoundError, match=r"run 'a' is not in this store \(runs here: none\)"):
        store.run("a")
    with pytest.raises(MalformedError):
        store.run("../a", create=True)
    run = store.run("a", create=True)
    assert store.run("a") is run
    (store.root / "No Run").mkdir()
    (store.root / "status").mkdir()
    assert store.runs() == ["a"]
    node = store.node_id()
    assert len(node) == 32
    assert Store(store.root).node_id() == node
    assert store.node_id() == node
    (store.root / ".node-id").write_text("junk")
    assert Store(store.root).node_id() != node
    store.close()


def test_a_node_id_that_cannot_be_kept_lasts_as_long_as_the_store_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise DiskError("writing failed: Read-only file system")

    monkeypatch.setattr("shardcast.store.store.atomic_write", refuse)
    store = Store(tmp_path)
    assert store.node_id() == store.node_id()
    assert len(store.node_id()) == 32
    assert list(tmp_path.iterdir()) == []


def test_files_are_made_for_everyone_to_read(run: RunStore, sample: Sample) -> None:
    stored: StoredVersion = sample.fill(run)
    mode = stat.S_IMODE((stored.directory / "config.json").stat().st_mode)
    assert mode == 0o644 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_recording_many_shards_at_once(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    stored = run.stage(sample.version)
    for entry, data in sample.files.items():
        (stored.directory / entry).write_bytes(data)
    stored.record_all({n: xxhash.xxh3_128_digest(sample.shard(n)) for n in range(4)})
    assert all(stored.confirm(n) for n in range(4))
    assert reopened(run).stage(sample.version).present() == {0, 1, 2, 3}


def test_a_directory_that_cannot_be_looked_into_hides_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lost+found`` in a store that is a volume of its own, and a relay that is not root."""
    store = Store(tmp_path)
    store.run("a", create=True).write_head(b"{}")
    for name in ("lost+found", "b"):
        (tmp_path / name).mkdir()
    real = Path.stat

    def refused(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.parent.name in ("lost+found", "b"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", refused)
    assert Store(tmp_path).runs() == ["a"]
    with pytest.raises(NotFoundError):
        Store(tmp_path).run("b")
