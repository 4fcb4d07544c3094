"""Publishing into a local store: atomic, self-consistent, and never over somebody else's run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from shardcast import announcing, keys, staging
from shardcast.errors import (
    BusyError,
    ClockError,
    DiskFullError,
    ModifiedError,
    NotFoundError,
    StateError,
    UnknownKeyError,
    UsageError,
    WithdrawnError,
)
from shardcast.hashing import ShardHash
from shardcast.protocol import succession, trust
from shardcast.protocol.envelope import Signer, encode_key, open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.protocol.trust import TrustState
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions, SilentObserver
from shardcast.store import files
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from tests.models import make_model, write_model
from tests.tree import contents_of
from tests.unit.publishing.conftest import START_MS, Clock


def head_of(run: RunStore) -> Head:
    data = run.read_head()
    assert data is not None
    return decode_head(open_unverified(data)[1])


class Noting(SilentObserver):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def noticed(self, message: str) -> None:
        self.notices.append(message)


def test_the_version_is_the_directory_byte_for_byte(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    done = publish_directory(PublishOptions(source=checkpoint, step=7), run, [signer], clock)

    assert done.path == run.root / "versions" / "000001"
    assert done.path is not None
    assert contents_of(done.path) == contents_of(checkpoint)
    head = head_of(run)
    assert (head.version, head.versions[0].step, head.open, head.hold) == (1, 7, None, False)
    assert head.versions[0].bytes == sum(len(data) for data in contents_of(checkpoint).values())
    assert head.keys == [encode_key(signer.public_key)]
    assert head.expires_at - head.issued_at == 7 * 24 * 3600 * 1000


def test_every_shard_digest_is_blake3_of_its_extent(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    done = publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    version = run.load_version(done.ref)
    assert version is not None
    assert version.layout.shard_bytes == 256 * 1024
    assert version.layout.shard_count == 6  # 1 config, 3 + 1 model, 0 empty, 1 vocabulary
    for extent in version.layout.extents():
        data = (checkpoint / extent.path).read_bytes()[extent.offset :][: extent.length]
        assert version.digests[extent.shard] == blake3(data).hexdigest()


@pytest.mark.parametrize("link", [False, True])
def test_a_published_version_is_confirmed_from_a_new_process_view(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock, link: bool
) -> None:
    publish_directory(PublishOptions(source=checkpoint, link=link), run, [signer], clock)
    again = RunStore(run.root, run.run)
    stored = again.stored(1)
    assert stored is not None
    assert stored.complete
    assert all(stored.confirm(shard) for shard in range(stored.version.layout.shard_count))


def test_versions_grow_and_the_head_retains_the_newest(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    for _ in range(4):
        publish_directory(PublishOptions(source=checkpoint, keep=2), run, [signer], clock)
    head = head_of(run)
    assert [ref.version for ref in head.versions] == [4, 3]
    assert run.committed() == [4, 3]
    kept = {ref.manifest for ref in head.versions}
    assert kept <= set(run.blobs())
    assert len(run.blobs()) == 2 * 3  # layout, part and manifest of each


def test_what_describes_a_version_that_is_half_removed_is_in_nobodys_way(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    """A publisher was killed between taking a directory's name away and removing its state."""
    options = PublishOptions(source=checkpoint)
    publish_directory(options, run, [signer], clock)
    (checkpoint / "config.json").write_text('{"another": "layout"}')
    publish_directory(options, run, [signer], clock)
    left = [*(run.root / "state").glob("000002.*"), *(run.root / "blobs").iterdir()]
    contents = {path: path.read_bytes() for path in left}
    shutil.rmtree(run.root)
    (checkpoint / "config.json").write_text("{}")
    publish_directory(options, run, [signer], clock)
    for path, data in contents.items():
        path.write_bytes(data)

    done = publish_directory(options, RunStore(run.root, run.run), [signer], clock)

    assert done.ref.version == 2
    assert done.path is not None
    assert contents_of(done.path) == contents_of(checkpoint)


def test_a_version_with_a_reader_is_kept_until_it_is_done(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    options = PublishOptions(source=checkpoint, keep=1)
    publish_directory(options, run, [signer], clock)
    reader = RunStore(run.root, run.run).stored(1)
    assert reader is not None
    with reader.lease():
        done = publish_directory(options, run, [signer], clock)
        assert done.collected is not None
        assert done.collected.busy == (1,)
        assert run.committed() == [2, 1]
        assert reader.confirm(0)
    publish_directory(options, run, [signer], clock)
    assert run.committed() == [3]


def test_unchanged_shard_size_is_kept_while_the_checkpoint_grows_a_little(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    big = checkpoint / "big.bin"
    with open(big, "wb") as file:
        file.truncate(100 * 1024 * 1024)
    sizes = []
    for megabytes in (100, 120, 300, 1000):
        os.truncate(big, megabytes * 1024 * 1024)
        done = publish_directory(PublishOptions(source=checkpoint, link=True), run, [signer], clock)
        version = run.load_version(done.ref)
        assert version is not None
        sizes.append(version.layout.shard_bytes // (256 * 1024))
    assert sizes == [4, 4, 4, 32]  # 1 MiB kept while within 4x, then 8 MiB


def test_lineage_continues_until_a_new_one_is_named(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    found = []
    for lineage in (None, None, "restart-3", None):
        done = publish_directory(
            PublishOptions(source=checkpoint, lineage=lineage), run, [signer], clock
        )
        version = run.load_version(done.ref)
        assert version is not None
        found.append(version.layout.lineage)
    assert found[0] == found[1] != "restart-3"
    assert found[2:] == ["restart-3", "restart-3"]


# --- modified meanwhile ----------------------------------------------------------------------


def _change_while_hashing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    real = staging.hash_files

    def hash_then_change(*args: Any) -> list[ShardHash]:
        found = real(*args)
        change()
        return found

    monkeypatch.setattr(staging, "hash_files", hash_then_change)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("kind", ["written", "truncated", "removed", "appeared", "replaced"])
def test_a_change_while_publishing_is_detected_and_nothing_is_announced(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    link: bool,
    kind: str,
) -> None:
    publish_directory(PublishOptions(source=checkpoint, link=link), run, [signer], clock)
    before = run.read_head()
    target = checkpoint / "config.json"

    def change() -> None:
        if kind == "written":
            target.write_text("{'x': 1}           ")
        elif kind == "truncated":
            os.truncate(target, 3)
        elif kind == "removed":
            target.unlink()
        elif kind == "appeared":
            (checkpoint / "late.json").write_text("{}")
        else:
            other = checkpoint.parent / "other"
            other.write_bytes(target.read_bytes())
            os.replace(other, target)

    _change_while_hashing(monkeypatch, change)
    with pytest.raises(ModifiedError, match=r"config\.json|late\.json"):
        publish_directory(PublishOptions(source=checkpoint, link=link), run, [signer], clock)
    assert run.read_head() == before
    assert run.committed() == [1]
    assert run.staged() == []


def test_a_file_modified_later_under_a_link_is_never_confirmed_again(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    publish_directory(PublishOptions(source=checkpoint, link=True), run, [signer], clock)
    stored = RunStore(run.root, run.run).stored(1)
    assert stored is not None
    assert all(stored.confirm(shard) for shard in range(6))
    with open(checkpoint / "model-00001-of-00002.safetensors", "r+b") as file:
        file.seek(300 * 1024)
        file.write(b"another step")
    good = [stored.confirm(shard) for shard in range(6)]
    changed = next(
        extent.shard
        for extent in stored.version.layout.extents()
        if extent.path.startswith("model-00001") and extent.offset == 256 * 1024
    )
    assert good == [shard != changed for shard in range(6)]
    assert stored.damaged is not None
    assert "model-00001-of-00002.safetensors" in stored.damaged
    assert not stored.complete


def test_a_copy_does_not_care_what_happens_to_the_source_later(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    for path in checkpoint.rglob("*.safetensors"):
        path.write_bytes(b"gone")
    stored = run.stored(1)
    assert stored is not None
    assert all(stored.confirm(shard) for shard in range(6))


# --- kills and rivals ------------------------------------------------------------------------

_KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
from shardcast import keys, publisher, publishing, staging
from shardcast.store.run import RunStore
from shardcast.store.store import Store

store, source, key, where = sys.argv[1:]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

owner, name = {
    "hash": (staging, "hash_files"),
    "documents": (RunStore, "write_blob"),
    "commit": (RunStore, "commit"),
    "number": (RunStore, "write_trust"),
    "head": (RunStore, "write_head"),
    "trust": (RunStore, "write_trust"),
    "collect": (publisher, "collect"),
}[where]
first = [getattr(owner, name)] if where == "trust" else []  # the number is noted by it
setattr(owner, name, lambda *given, **named: (first.pop() if first else die)(*given, **named))
signers = keys.load_signers(Path(key), 0)
run = Store(Path(store)).run("default")
publisher.publish_directory(
    publishing.PublishOptions(source=Path(source)), run, signers, lambda: 1_800_000_100_000
)
"""


@pytest.mark.parametrize(
    "where", ["hash", "documents", "commit", "number", "head", "trust", "collect"]
)
def test_a_kill_at_any_point_leaves_the_previous_head_or_the_new_one(
    tmp_path: Path, checkpoint: Path, run: RunStore, clock: Clock, where: str
) -> None:
    key, _ = keys.generate(tmp_path / "k")
    signer = keys.load_signer(key)
    publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            _KILL_SCRIPT,
            str(run.root.parent),
            str(checkpoint),
            str(key),
            where,
        ],
        check=False,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL

    fresh = RunStore(run.root, run.run)
    head = head_of(fresh)
    assert head.version == (2 if where in ("trust", "collect") else 1)
    stored = fresh.stored(head.version)
    assert stored is not None
    assert stored.complete
    clock.now += 200_000
    done = publish_directory(PublishOptions(source=checkpoint), fresh, [signer], clock)
    # Where a head was about to name a number, nobody knows whether somebody has read it.
    assert done.ref.version == head.version + (2 if where == "head" else 1)
    assert done.path is not None
    assert contents_of(done.path) == contents_of(checkpoint)
    assert fresh.staged() == []
    assert sorted(fresh.committed()) == [*range(1, head.version + 1), done.ref.version]


@pytest.mark.parametrize("what", ["name", "trust", "copy"])
def test_trouble_after_the_announcement_is_said_and_is_no_failure(
    tmp_path: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """A trainer that hears of a failure publishes the same step again."""
    write_model(tmp_path / "model" / "model.safetensors", make_model(1))
    options = PublishOptions(source=tmp_path / "model", stream=None, compress=what == "copy")
    write_head, write_trust, sync = RunStore.write_head, RunStore.write_trust, files.fsync_directory
    heads: list[bytes] = []

    def heading(self: RunStore, envelope: bytes) -> None:
        if what == "copy" and heads:
            raise DiskFullError("no room")
        heads.append(envelope)
        write_head(self, envelope)

    def trusting(self: RunStore, state: TrustState) -> None:
        if what == "trust" and heads:
            raise DiskFullError("no room")
        write_trust(self, state)

    def syncing(path: Path) -> None:
        if what == "name" and path == run.root:
            raise OSError(errno.EIO, "no room, says the disk")
        sync(path)

    watch = Noting()
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "write_head", heading)
        patch.setattr(RunStore, "write_trust", trusting)
        patch.setattr(files, "fsync_directory", syncing)
        done = publish_directory(options, run, [signer], clock, watch)
    assert head_of(run).newest() == done.ref
    assert done.ref.deltas == []
    assert [note for note in watch.notices if "no room" in note]
    again = publish_directory(options, RunStore(run.root, run.run), [signer], clock)
    assert again.ref.version == 2
    assert any(delta.base is None for delta in again.ref.deltas) == (what == "copy")


def test_a_head_that_nobody_can_read_is_a_failure(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target == run.root / "head.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    options = PublishOptions(source=checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(DiskFullError):
            publish_directory(options, run, [signer], clock)
    assert run.read_head() is None
    assert publish_directory(options, run, [signer], clock).ref.version == 2


def test_two_publishers_of_one_run_take_turns(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    errors: list[BaseException] = []

    def publish() -> None:
        try:
            own = RunStore(run.root, run.run)
            publish_directory(PublishOptions(source=checkpoint), own, [signer], clock)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert [ref.version for ref in head_of(run).versions] == [4, 3, 2, 1]


def test_a_publisher_that_waits_too_long_is_refused_with_the_holders_pid(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcing, "LOCK_WAIT_S", 0.0)
    with run.lock("publish"), pytest.raises(BusyError, match=f"process {os.getpid()}"):
        publish_directory(
            PublishOptions(source=checkpoint), RunStore(run.root, run.run), [signer], clock
        )


def test_another_key_cannot_publish_into_a_run(
    tmp_path: Path, checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    stranger = keys.load_signer(keys.generate(tmp_path / "other")[0])
    with pytest.raises(UnknownKeyError):
        publish_directory(PublishOptions(source=checkpoint), run, [stranger], clock)
    assert run.committed() == [1]


def test_rotation_signs_with_both_keys_and_refuses_the_old_one_alone(
    tmp_path: Path, checkpoint: Path, run: RunStore, clock: Clock
) -> None:
    old_path, _ = keys.generate(tmp_path / "old")
    new_path, _ = keys.generate(tmp_path / "new")
    old, new = keys.load_signer(old_path), keys.load_signer(new_path)
    publish_directory(PublishOptions(source=checkpoint), run, [old], clock)
    worker = trust.accept(
        trust.begin("default", pinned=[old.public_key]), run.read_head() or b"", clock()
    ).state

    keys.record_rotation(new_path, old_path, START_MS)
    signers = keys.load_signers(new_path, START_MS + 1)
    assert [s.public_key for s in signers] == [new.public_key, old.public_key]
    publish_directory(PublishOptions(source=checkpoint), run, signers, clock)
    worker = trust.accept(worker, run.read_head() or b"", clock()).state
    assert worker.keys == [encode_key(new.public_key)]

    with pytest.raises(UnknownKeyError, match="rotated out"):
        publish_directory(PublishOptions(source=checkpoint), run, [old], clock)
    days_30 = 30 * 24 * 3600 * 1000
    assert len(keys.load_signers(new_path, START_MS + days_30 - 1)) == 2
    assert len(keys.load_signers(new_path, START_MS + days_30)) == 1


# --- withdraw and hold -----------------------------------------------------------------------


def test_withdraw_moves_the_head_to_the_newest_that_is_left(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    for _ in range(3):
        publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)

    def withdraw(version: int) -> Head:
        return announcing.amend(
            run, [signer], clock, lambda h, i: succession.with_withdrawn(h, i, version)
        )

    assert withdraw(3).version == 2
    assert withdraw(1).version == 2
    with pytest.raises(WithdrawnError, match="withdrawn already"):
        withdraw(3)
    with pytest.raises(NotFoundError, match="retained: 3, 2, 1"):
        withdraw(9)
    assert withdraw(2).version is None
    done = publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    assert done.ref.version == 4
    assert head_of(run).withdrawn == [3, 1, 2]


def test_hold_is_set_and_lifted(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    with pytest.raises(NotFoundError, match="no head yet"):
        announcing.amend(run, [signer], clock, lambda h, i: succession.with_hold(h, i, hold=True))
    publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    announcing.amend(run, [signer], clock, lambda h, i: succession.with_hold(h, i, hold=True))
    assert head_of(run).hold
    announcing.amend(run, [signer], clock, lambda h, i: succession.with_hold(h, i, hold=False))
    assert not head_of(run).hold


# --- sources that are awkward ----------------------------------------------------------------


def test_a_hugging_face_cache_snapshot_is_published_through_its_links(
    tmp_path: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, data in {"model.safetensors": os.urandom(1000), "config.json": b"{}"}.items():
        (blobs / blake3(data).hexdigest()).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / blake3(data).hexdigest())
    for link in (False, True):
        done = publish_directory(PublishOptions(source=snapshot, link=link), run, [signer], clock)
        assert done.path is not None
        assert contents_of(done.path) == contents_of(snapshot)
        assert not any(path.is_symlink() for path in done.path.rglob("*"))


def test_a_file_over_4_gib_keeps_its_size_and_shards(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    size = 4 * 1024**3 + 5
    with open(checkpoint / "huge.safetensors", "wb") as file:
        file.truncate(size)
        file.seek(size - 5)
        file.write(b"tail!")
    done = publish_directory(PublishOptions(source=checkpoint, link=True), run, [signer], clock)
    version = run.load_version(done.ref)
    assert version is not None
    file_number = [f.path for f in version.layout.files].index("huge.safetensors")
    shards = version.layout.file_shards(file_number)
    assert len(shards) == 257
    last = version.layout.extent(shards[-1])
    assert (last.offset, last.length) == (4 * 1024**3, 5)
    assert version.digests[shards[-1]] == blake3(b"tail!").hexdigest()
    assert len({version.digests[shard] for shard in shards}) == 2


def test_linking_over_a_file_system_border_says_what_to_do(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UsageError, match="without --link, or put --store on the same"):
        publish_directory(PublishOptions(source=checkpoint, link=True), run, [signer], clock)
    assert run.staged() == []


def test_a_full_disk_is_named_before_anything_is_announced(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    os.truncate(checkpoint / "empty.txt", 1 << 42)  # sparse, 4 TiB
    with pytest.raises(DiskFullError, match=r"needs 4398047\d+ bytes and \d+ are free"):
        publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    assert run.read_head() is None


def test_no_durability_still_commits(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    options = PublishOptions(source=checkpoint, durability=Durability.NONE)
    publish_directory(options, run, [signer], clock)
    assert run.committed() == [1]


def test_a_damaged_stored_head_is_named_with_the_way_on(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
    path = run.root / "head.json"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))  # as a power cut leaves it
    for _ in range(2):
        with pytest.raises(StateError, match=r"/v1/.*/head, or remove the file") as caught:
            publish_directory(PublishOptions(source=checkpoint), run, [signer], clock)
        assert caught.value.source == str(path)
    path.write_bytes(good)  # from a relay
    assert (
        publish_directory(PublishOptions(source=checkpoint), run, [signer], clock).ref.version == 2
    )
    path.unlink()
    assert (
        publish_directory(PublishOptions(source=checkpoint), run, [signer], clock).ref.version == 3
    )


def test_a_publication_with_a_clock_ahead_is_undone_as_the_message_says(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    options = PublishOptions(source=checkpoint)
    publish_directory(options, run, [signer], clock)
    head = (run.root / "head.json").read_bytes()  # and any relay serves it still
    before, clock.now = clock.now, clock.now + 48 * 3600 * 1000
    publish_directory(options, run, [signer], clock)
    clock.now = before
    with pytest.raises(ClockError, match=r"2\.0 days ahead.*Set this clock.*state/trust\.json"):
        publish_directory(options, run, [signer], clock)
    (run.root / "head.json").write_bytes(head)
    (run.root / "state" / "trust.json").unlink()
    assert publish_directory(options, run, [signer], clock).ref.version == 2
