"""Streaming to a remote origin: what was sent is announced while the rest is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcast import uploader
from shardcast.errors import ModifiedError, NetworkError
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import Head, OpenRef, decode_head
from shardcast.protocol.layout import decode_part
from shardcast.publishing import Published
from shardcast.store.run import RunStore
from shardcast.uploading import RemoteOutlet
from tests.contract.test_remote_deltas import Trainer, check
from tests.contract.test_remote_publishing import TOKEN, Origin
from tests.models import U16, make_model, step
from tests.streams import AT_ONCE
from tests.tree import contents_of

MIB = 1 << 20
ELEMENTS = 6_000_000
"""Three tensors of so many make three runs of 16 MiB, in shards of 512 KiB."""


class Recorder:
    """Makes clients that remember what they were told to send, and may fail."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.sent: list[str] = []
        self.before_blob: Callable[[str, Body], None] = lambda digest, body: None
        recorder = self

        class Recording(OriginClient):
            def put_head(self, envelope: bytes, previous: bytes | None) -> None:
                super().put_head(envelope, previous)
                recorder.heads.append(decode_head(open_unverified(envelope)[1]))

            def put_blob(self, digest: str, body: Body) -> None:
                recorder.before_blob(digest, body)
                super().put_blob(digest, body)
                recorder.sent.append(digest)

        self.client = Recording

    @property
    def opened(self) -> list[OpenRef]:
        return [head.open for head in self.heads if head.open is not None]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def trainer(tmp_path: Path, recorder: Recorder) -> Trainer:
    made = Trainer(tmp_path / "trainer")
    made.client = recorder.client
    return made


@pytest.fixture
def origin(tmp_path: Path, trainer: Trainer) -> Iterator[Origin]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    server = Origin(tmp_path / "origin", tmp_path / "token", trainer.signer.public_key)
    yield server
    server.stop()


def publish(trainer: Trainer, origin: Origin, model: dict[str, U16], **options: Any) -> Published:
    return trainer.publish(origin, model, **{"stream": AT_ONCE, "threads": 1, **options})


def shards_of(store: RunStore, opened: OpenRef) -> list[int]:
    return sorted(
        shard
        for digest in opened.parts
        for shard in decode_part(store.read_blob(digest) or b"").shards
    )


def test_shards_are_announced_as_they_arrive_and_sent_once(
    origin: Origin, trainer: Trainer, recorder: Recorder
) -> None:
    model = make_model(1, elements=400_000)
    done = publish(trainer, origin, model, delta=False)
    assert len(recorder.opened) == done.streamed > 2
    listed = [len(opened.parts) for opened in recorder.opened]
    assert listed == sorted(listed)
    assert recorder.heads[-1].open is None
    assert recorder.heads[-1].version == 1
    assert done.uploaded_bytes == done.ref.bytes
    assert len(recorder.sent) == len(set(recorder.sent))
    assert contents_of(origin.root / "run" / "versions" / "000001") == contents_of(trainer.source)
    assert trainer.notices == []


def test_a_small_version_is_announced_once(
    origin: Origin, trainer: Trainer, recorder: Recorder
) -> None:
    done = trainer.publish(origin, make_model())
    assert done.streamed == 0
    assert len(recorder.heads) == 1


def test_a_step_costs_the_delta_also_if_it_streams(
    origin: Origin, trainer: Trainer, recorder: Recorder
) -> None:
    """Shards wait for the part of the delta that rebuilds them: else the uplink would carry both."""
    old = make_model(1, elements=ELEMENTS)
    publish(trainer, origin, old, stream=None)
    done = publish(trainer, origin, step(old, 1, 0.05))
    assert check(origin, 2) == [1]
    assert done.uploaded_bytes < done.ref.deltas[0].bytes
    promised = [opened.deltas for opened in recorder.opened]
    assert all([(d.base_version) for d in deltas] == [1] for deltas in promised)
    assert len(promised[-1][0].parts) >= 1
    assert recorder.opened[-1].parts
    assert contents_of(origin.root / "run" / "versions" / "000002") == contents_of(trainer.source)
    assert trainer.notices == []


def test_an_origin_that_is_gone_for_a_moment_costs_the_stream_only(
    origin: Origin, trainer: Trainer, recorder: Recorder
) -> None:
    count = 0
    lock = threading.Lock()

    def fail(digest: str, body: Body) -> None:
        nonlocal count
        with lock:
            count += body.path is not None
            if body.path is not None and count == 3:
                raise NetworkError("the link is down")

    recorder.before_blob = fail
    done = publish(trainer, origin, make_model(1, elements=400_000), delta=False)
    assert [n for n in trainer.notices if "announced once it is whole: the link is down" in n]
    assert done.uploaded_bytes < 1.5 * done.ref.bytes
    assert contents_of(origin.root / "run" / "versions" / "000001") == contents_of(trainer.source)
    head = origin.head()
    assert head is not None
    assert head.open is None


def test_a_file_that_changes_meanwhile_ends_the_open_version(
    origin: Origin, trainer: Trainer, recorder: Recorder
) -> None:
    changed = threading.Event()

    def change(digest: str, body: Body) -> None:
        if body.path is not None and len(recorder.sent) > 4 and not changed.is_set():
            changed.set()
            (trainer.source / "extra.json").write_text("{}")

    recorder.before_blob = change
    with pytest.raises(ModifiedError):
        publish(trainer, origin, make_model(1, elements=400_000), delta=False)
    assert recorder.opened
    assert recorder.heads[-1].open is None
    assert recorder.heads[-1].version is None


class Killed(BaseException):
    """As good as SIGKILL for the origin: nobody says that the version was given up."""


def test_what_a_killed_publisher_sent_is_not_sent_again(
    origin: Origin, trainer: Trainer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(1, elements=400_000)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(uploader, "require_unchanged", die)
        patch.setattr(RemoteOutlet, "give_up", lambda self: None)
        with pytest.raises(Killed):
            publish(trainer, origin, model, delta=False)
    left = recorder.heads[-1].open
    assert left is not None
    known = shards_of(RunStore(origin.root / "run", "run"), left)
    assert known
    done = publish(trainer, origin, model, delta=False)
    assert done.ref.version == 2
    assert done.uploaded_bytes == 0  # the first one had sent all of it
    assert recorder.heads[-1].open is None
    assert contents_of(origin.root / "run" / "versions" / "000002") == contents_of(trainer.source)
