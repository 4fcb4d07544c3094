"""Each file operation of each writing command fails in turn, until none is left to fail."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from shardcast import keys
from shardcast.errors import DiskError, IntegrityError, ShardcastError
from shardcast.export import export_run
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, decode_head
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.files import atomic_write
from shardcast.store.retention import collect, unreachable_versions
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from shardcast.verify import verify_directory
from tests.contract.made import SHARD, noise, signer
from tests.faults.refusals import LASTING, refusing

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
MOST_CALLS = 400


def _checkpoint(directory: Path, number: int) -> dict[str, bytes]:
    files = {
        "model.safetensors": noise(2 * SHARD + 77, number),
        "sub/tokenizer.json": noise(1000, number + 100),
        "empty": b"",
    }
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return files


@dataclass
class Place:
    """A store with one version, and a checkpoint that could be the second."""

    root: Path
    published: dict[int, dict[str, bytes]]

    @classmethod
    def make(cls, root: Path) -> Self:
        made = cls(root, {1: _checkpoint(root / "one", 1), 2: _checkpoint(root / "two", 2)})
        made.publish("one")
        for path in (root / "two", *(root / "two").rglob("*")):
            os.utime(path, (1_700_000_000, 1_700_000_000))  # settled: publishing needs no pause
        return made

    def copy(self, root: Path) -> Self:
        shutil.copytree(self.root, root)
        return type(self)(root, self.published)

    @property
    def store(self) -> Path:
        return self.root / "store" / "policy"

    def run(self) -> RunStore:
        return RunStore(self.store, "policy")

    def publish(self, what: str, *, link: bool = False) -> None:
        run = self.run()
        try:
            options = PublishOptions(source=self.root / what, threads=1, link=link)
            publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000)
        finally:
            run.close()

    def head(self) -> Head:
        data = self.run().read_head()
        assert data is not None
        return decode_head(open_unverified(data)[1])

    def assert_sound(self) -> None:
        """Every final name has the bytes it should have, and what the head names is there."""
        for directory in (self.store / "versions").iterdir():
            if directory.name.startswith("."):
                continue
            number = int(directory.name)
            found = {
                str(path.relative_to(directory)): path.read_bytes()
                for path in directory.rglob("*")
                if path.is_file()
            }
            assert found == self.published[min(number, 2)], directory
        for blob in (self.store / "blobs").glob("*.bin"):
            if not blob.name.startswith("."):
                assert digest_of(blob.read_bytes()) == blob.stem
        run = self.run()
        for ref in self.head().versions:
            stored = run.stored(ref.version)
            assert stored is not None
            assert stored.complete
        run.close()


def _publish(place: Place) -> None:
    place.publish("two")


def _link(place: Place) -> None:
    place.publish("two", link=True)


def _export(place: Place) -> None:
    run = place.run()
    try:
        export_run(run, place.root / "out", threads=1)
    finally:
        run.close()


def _export_is_sound(place: Place) -> None:
    """A blob under its name has its digest; a head is there only with all it reaches."""
    out = place.root / "out" / "v1" / "policy"
    blobs = [blob for blob in out.glob("blobs/*.bin") if not blob.name.startswith(".")]
    for blob in blobs:
        assert digest_of(blob.read_bytes()) == blob.stem
    if (out / "head").exists():
        assert (out / "head").read_bytes() == (place.store / "head.json").read_bytes()
        assert len(blobs) == 3 + 4  # documents, and the shards: 3 and 1


def _gc(place: Place) -> None:
    run = place.run()
    try:
        with run.lock("publish", what="gc"):
            collect(run, unreachable_versions(run))
    finally:
        run.close()


def _keygen(place: Place) -> None:
    keys.generate(place.root / "keys")


def _keys_are_sound(place: Place) -> None:
    """Both files or neither, unless the disk did not even let us clean up: then never a short one."""
    directory = place.root / "keys"
    private, public = directory / keys.PRIVATE_NAME, directory / keys.PUBLIC_NAME
    if public.exists():
        assert keys.load_signer(private).public_key == keys.load_public_key(public)


def _nothing(_place: Place) -> None:
    """No more to look at than every store."""


@dataclass(frozen=True)
class Case:
    """A command, and what must hold of what it leaves behind."""

    act: Callable[[Place], None]
    sound: Callable[[Place], None] = _nothing
    again: Callable[[Place], None] | None = None


def _keygen_again(place: Place) -> None:
    for name in (keys.PRIVATE_NAME, keys.PUBLIC_NAME):
        (place.root / "keys" / name).unlink(missing_ok=True)
    _keygen(place)


CASES = {
    "publish": Case(_publish),
    "publish --link": Case(_link),
    "export": Case(_export, _export_is_sound),
    "gc": Case(_gc),
    "keygen": Case(_keygen, _keys_are_sound, _keygen_again),
}


@pytest.mark.fault(15)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, id=f"{name}-{errno.errorcode[number]}")
        for name in CASES
        for number in ERRNOS
        if number != errno.EDQUOT or name == "publish"  # the same code as for ENOSPC
    ],
)
def test_every_refused_call_is_a_clear_error_and_nothing_is_lost(
    tmp_path: Path, name: str, number: int
) -> None:
    case = CASES[name]
    template = Place.make(tmp_path / "template")
    failures = 0
    for first in itertools.count(1):
        assert first < MOST_CALLS, "this never ends"
        place = template.copy(tmp_path / str(first))
        error: ShardcastError | None = None
        with refusing(number, first) as refusals:
            try:
                case.act(place)
            except (DiskError, IntegrityError) as raised:
                error = raised
        place.assert_sound()
        case.sound(place)
        if error is not None:
            failures += 1
            assert isinstance(error, DiskError) or number == errno.EIO, refusals.refused
            assert str(tmp_path) in str(error), f"{error} does not say where"
            if number in LASTING:
                assert os.strerror(number) in str(error) or "free" in str(error), str(error)
        (case.again or case.act)(place)  # with room again
        place.assert_sound()
        case.sound(place)
        assert not verify_directory(place.store, threads=1).damage
        shutil.rmtree(place.root)
        if not refusals.refused:
            break
    assert failures > (3 if name not in ("gc", "keygen") else 0)


@pytest.mark.fault(15)
@pytest.mark.parametrize("number", ERRNOS, ids=lambda number: errno.errorcode[number])
def test_an_atomic_write_leaves_the_old_or_the_new(tmp_path: Path, number: int) -> None:
    for first in itertools.count(1):
        path = tmp_path / str(first) / "state.json"
        atomic_write(path, b"old" * 1000)
        said = None
        with refusing(number, first) as refusals:
            try:
                atomic_write(path, b"new" * 1000)
            except DiskError as error:
                said = str(error)
        assert said is None or str(path) in said
        found = path.read_bytes()
        assert found in (b"old" * 1000, b"new" * 1000)
        assert found == b"new" * 1000 or said is not None
        atomic_write(path, b"new" * 1000)
        assert path.read_bytes() == b"new" * 1000
        if not refusals.refused:
            assert first > 3
            break


@pytest.mark.fault(15)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_failed_once_is_not_believed_the_next_time(tmp_path: Path, number: int) -> None:
    """Linux reports an fsync error once, and calls the lost pages clean."""
    place = Place.make(tmp_path)
    run = place.run()
    source = place.root / "two"
    options = PublishOptions(source=source, threads=1, durability=Durability.NONE)
    publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000)
    run.close()
    # Stage it once more under the next number, as a worker has it before its commit.
    committed = place.store / "versions" / "000002"
    staged = place.store / "state" / "staging" / "000002"
    staged.parent.mkdir(parents=True, exist_ok=True)
    committed.rename(staged)
    run = place.run()
    stored = run.stored(2)
    assert stored is not None
    assert all(stored.confirm(shard) for shard in range(4))
    real = os.fsync
    lost: list[int] = []

    def fsync(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("model.safetensors") and not lost:
            lost.append(fd)
            with open(name, "r+b") as file:  # what the disk has, once the cache is dropped
                file.seek(SHARD + 5)
                file.write(bytes(4096))
            raise OSError(number, os.strerror(number))
        real(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskError, match=r"syncing failed.*model\.safetensors"):
            run.commit(2)
        assert stored.missing() == [1]
        with pytest.raises(IntegrityError, match="lacks 1 shard"):
            run.commit(2)
    assert not committed.exists()
    run.close()
