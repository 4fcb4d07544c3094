"""Publishing deltas to a remote origin: made from what the publisher kept of the version before."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcast import keys
from shardcast.codec.decode import decode_frame_into
from shardcast.codec.encode import BaseReader, encode_frame
from shardcast.errors import DiskFullError, NetworkError
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol.head import Head
from shardcast.publishing import Published, PublishOptions, SilentObserver
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.store.stored import StoredVersion
from shardcast.uploader import publish_remote
from tests.contract.test_remote_publishing import TOKEN, Origin
from tests.models import U16, changed_elements, make_model, step, write_model
from tests.tree import contents_of
from tests.unit.publishing.rebuilding import load, rebuild


class Trainer(SilentObserver):
    """What publishes: a key, a model, what it remembers, and what it keeps."""

    def __init__(self, root: Path) -> None:
        self.source = root / "model"
        self.signer = keys.load_signer(keys.generate(root / "key")[0])
        self.memory = Store(root / "memory").run("run", create=True)
        self.cache = RunStore(root / "cache" / "run", "run")
        self.now = int(time.time() * 1000) - 3_600_000
        self.notices: list[str] = []
        self.client = OriginClient

    def noticed(self, message: str) -> None:
        self.notices.append(message)

    def clock(self) -> int:
        self.now += 1
        return self.now

    def publish(self, origin: Origin, model: dict[str, U16], **options: Any) -> Published:
        write_model(self.source / "model.safetensors", model)
        return publish_remote(
            PublishOptions(source=self.source, **options),
            self.memory,
            lambda: self.client(origin.url, "run", TOKEN),
            [self.signer],
            self.clock,
            self,
            self.cache,
        )


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "trainer")


@pytest.fixture
def origin(tmp_path: Path, trainer: Trainer) -> Iterator[Origin]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    server = Origin(tmp_path / "origin", tmp_path / "token", trainer.signer.public_key)
    yield server
    server.stop()


def check(origin: Origin, number: int) -> list[int | None]:
    """Rebuild a version at the origin from what lies there; return the bases of its deltas."""
    store = RunStore(origin.root / "run", "run")
    head = origin.head()
    assert head is not None
    ref = head.ref(number)
    assert ref is not None
    target = load(store, ref)
    for delta in ref.deltas:
        base_ref = None if delta.base_version is None else head.ref(delta.base_version)
        base = None if base_ref is None else load(store, base_ref)
        directory = None if base is None else store.version_directory(base.number)
        found = rebuild(store, target, delta, base, directory)
        assert len(found) == target.layout.shard_count
    store.close()
    return [delta.base_version for delta in ref.deltas]


def test_a_step_is_announced_at_the_origin_with_its_delta(origin: Origin, trainer: Trainer) -> None:
    old = make_model()
    new = step(old, 1)
    assert trainer.publish(origin, old).deltas == ()
    done = trainer.publish(origin, new)
    assert check(origin, 2) == [1]
    assert done.ref.deltas[0].bytes < 1.5 * changed_elements(old, new)
    assert done.uploaded_bytes < done.ref.deltas[0].bytes  # the origin rebuilt all shards
    assert contents_of(origin.root / "run" / "versions" / "000002") == contents_of(trainer.source)
    assert trainer.notices == []


def test_one_version_is_kept_and_nothing_else(origin: Origin, trainer: Trainer) -> None:
    model = make_model()
    for seed in range(3):
        trainer.publish(origin, step(model, seed))
    assert trainer.cache.committed() == [3]
    assert trainer.cache.staged() == []
    assert len(trainer.cache.blobs()) == 3  # layout, part, manifest
    assert contents_of(trainer.cache.version_directory(3)) == contents_of(trainer.source)


def test_the_cache_may_be_lost_and_a_link_is_a_cache_too(origin: Origin, trainer: Trainer) -> None:
    model = make_model()
    trainer.publish(origin, model)
    trainer.cache.close()
    shutil.rmtree(trainer.cache.root)
    assert trainer.publish(origin, step(model, 1), link=True).ref.deltas == []
    assert trainer.notices == ["without a delta from version 1: it is not here"]
    (trainer.source / "model.safetensors").unlink()  # written once: a new file for the next step
    trainer.publish(origin, step(model, 2))
    assert check(origin, 3) == [2]


def test_without_deltas_nothing_is_kept(origin: Origin, trainer: Trainer) -> None:
    trainer.publish(origin, make_model(), delta=False)
    assert not trainer.cache.root.exists()


def test_further_bases_and_a_copy_follow(
    origin: Origin, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    for seed in range(2):
        trainer.publish(origin, step(model, seed), delta_bases=(2,))
    heads: list[Head] = []
    real = OriginClient.put_head

    def put_head(self: OriginClient, envelope: bytes, previous: bytes | None) -> None:
        real(self, envelope, previous)
        found = origin.head()
        assert found is not None
        heads.append(found)

    monkeypatch.setattr(OriginClient, "put_head", put_head)
    done = trainer.publish(origin, step(model, 2), delta_bases=(2,), compress=True)
    bases = [[d.base_version for d in head.versions[0].deltas] for head in heads]
    assert bases == [[2], [2, 1, None]]
    assert check(origin, 3) == [2, 1, None]
    assert [delta.ref for delta in done.deltas] == done.ref.deltas
    assert trainer.cache.committed() == [3, 2]


def test_further_deltas_that_do_not_arrive_undo_nothing(origin: Origin, trainer: Trainer) -> None:
    class Dying(OriginClient):
        heads = 0

        def put_head(self, envelope: bytes, previous: bytes | None) -> None:
            super().put_head(envelope, previous)
            Dying.heads += 1

        def put_blob(self, digest: str, body: Body) -> None:
            if Dying.heads:
                raise NetworkError("cut off", source=self.url)
            super().put_blob(digest, body)

    trainer.client = Dying
    done = trainer.publish(origin, make_model(), compress=True)
    assert done.ref.deltas == []
    assert any("no further deltas" in notice for notice in trainer.notices)
    trainer.client = OriginClient
    trainer.publish(origin, step(make_model(), 1))
    assert check(origin, 2) == [1]


def test_a_disk_without_room_for_the_cache_publishes_without(
    origin: Origin, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **named: Any) -> None:
        raise DiskFullError("no room")

    monkeypatch.setattr("shardcast.placing.require_space", full)
    monkeypatch.setattr("shardcast.placing._clone_all", lambda *args: False)
    assert trainer.publish(origin, make_model()).ref.version == 1
    assert any("no room" in notice for notice in trainer.notices)
    assert trainer.cache.staged() == []
    assert contents_of(origin.root / "run" / "versions" / "000001") == contents_of(trainer.source)


def test_a_publisher_that_was_cut_off_goes_on_and_still_has_its_base(
    origin: Origin, trainer: Trainer
) -> None:
    class Dying(OriginClient):
        def put_head(self, envelope: bytes, previous: bytes | None) -> None:
            raise NetworkError("cut off", source=self.url)

    model = make_model()
    trainer.publish(origin, model)
    trainer.client = Dying
    with pytest.raises(NetworkError):
        trainer.publish(origin, step(model, 1))
    trainer.client = OriginClient
    done = trainer.publish(origin, step(model, 1))
    assert done.ref.version == 3  # nobody knows whether somebody has read of another 2
    assert check(origin, 3) == [1]
    assert done.uploaded_bytes == 0  # the delta came before, and the shards from it


def test_a_publisher_killed_after_its_head_still_has_a_base(
    origin: Origin, trainer: Trainer
) -> None:
    class KilledError(BaseException):
        pass

    class Dying(RunStore):
        def commit(self, *args: Any, **named: Any) -> StoredVersion:
            raise KilledError

    model, cache = make_model(), trainer.cache
    trainer.cache = Dying(cache.root, "run")
    with pytest.raises(KilledError):
        trainer.publish(origin, model)
    trainer.cache.close()
    trainer.cache = cache
    assert origin.head() is not None
    assert (cache.committed(), cache.staged()) == ([], [1])
    trainer.publish(origin, step(model, 1))
    assert check(origin, 2) == [1]


def test_what_a_delta_does_not_give_is_sent(origin: Origin, trainer: Trainer) -> None:
    """Noise is left out of the delta; a damaged shard of the origin's base rebuilds nothing."""
    model = make_model()
    (trainer.source / "noise").parent.mkdir(parents=True)
    (trainer.source / "noise").write_bytes(os.urandom(300_000))
    trainer.publish(origin, model)
    (trainer.source / "noise").write_bytes(os.urandom(300_000))
    done = trainer.publish(origin, step(model, 1))
    assert 300_000 < done.uploaded_bytes < 350_000

    base = origin.root / "run" / "versions" / "000002" / "model.safetensors"
    with open(base, "r+b") as file:
        file.seek(300_000)
        file.write(b"a bit of damage")
    done = trainer.publish(origin, step(model, 2))
    assert done.uploaded_bytes > 256 * 1024
    assert contents_of(origin.root / "run" / "versions" / "000003") == contents_of(trainer.source)


def test_an_origin_without_the_base_is_sent_everything(origin: Origin, trainer: Trainer) -> None:
    model = make_model()
    trainer.publish(origin, model)
    shutil.rmtree(origin.root / "run" / "versions" / "000001")
    done = trainer.publish(origin, step(model, 1))
    assert done.uploaded_bytes > done.ref.bytes
    assert contents_of(origin.root / "run" / "versions" / "000002") == contents_of(trainer.source)


def test_a_lying_delta_costs_its_upload_and_nothing_else(
    origin: Origin, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    trainer.publish(origin, model)

    def other(new: memoryview, *args: Any) -> bytes:
        changed = bytearray(new)
        changed[len(changed) // 2] ^= 1
        return encode_frame(memoryview(changed), *args)

    def as_if(frame: bytes, out: memoryview, base: BaseReader) -> None:
        decode_frame_into(frame, out, base)
        out[len(out) // 2] ^= 1

    monkeypatch.setattr("shardcast.delta_making.encode_frame", other)
    monkeypatch.setattr("shardcast.delta_making.decode_frame_into", as_if)
    done = trainer.publish(origin, step(model, 1))
    assert len(done.ref.deltas) == 1
    assert done.uploaded_bytes > 256 * 1024  # the shard that does not come out
    assert contents_of(origin.root / "run" / "versions" / "000002") == contents_of(trainer.source)
