"""A remote publication whose heads are taken, or not, and whose answers are lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shardcast.errors import (
    DiskFullError,
    ModifiedError,
    NetworkError,
    RefusedError,
    ShardcastError,
)
from shardcast.origin_client import Body, OriginClient
from shardcast.protocol import succession, trust
from shardcast.protocol.envelope import Signer, open_unverified, seal
from shardcast.protocol.head import Head, decode_head, encode_head
from shardcast.protocol.layout import Layout
from shardcast.publishing import Published, PublishOptions, SilentObserver
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from shardcast.streaming import Pace
from shardcast.uploader import amend_remote, publish_remote
from tests.models import make_model, step, write_model
from tests.streams import AT_ONCE
from tests.unit.publishing.conftest import Clock

TAKEN, LOST = True, False


def decoded(envelope: bytes) -> Head:
    return decode_head(open_unverified(envelope)[1])


@dataclass
class FakeOrigin:
    """Takes everything; of chosen heads the answer is lost, and some questions are not answered.

    Attributes:
        loses: Whether the answer to a head is lost: None, or whether it was taken.
        deaf: So many questions for the head are not answered after the first lost answer.
        before_blob: Called before a blob is taken.
    """

    loses: Callable[[Head], bool | None] = lambda head: None
    deaf: int = 0
    before_blob: Callable[[str], None] = lambda digest: None
    envelope: bytes | None = None
    heads: list[Head] = field(default_factory=list)
    blobs: set[str] = field(default_factory=set)
    lost: int = 0

    def client(self) -> OriginClient:
        return _Client(self)

    @property
    def head(self) -> Head:
        assert self.envelope is not None
        return decoded(self.envelope)


class _Client(OriginClient):
    def __init__(self, origin: FakeOrigin) -> None:
        super().__init__("http://127.0.0.1:1", "default", "token")
        self._origin = origin

    def head(self) -> bytes | None:
        origin = self._origin
        if origin.lost and origin.deaf:
            origin.deaf -= 1
            raise NetworkError("connection refused")
        return origin.envelope

    def layout_of(self, manifest: str) -> Layout | None:
        return None

    def missing(self, digests: Sequence[str]) -> list[str]:
        return [digest for digest in digests if digest not in self._origin.blobs]

    def put_blob(self, digest: str, body: Body) -> None:
        self._origin.before_blob(digest)
        self._origin.blobs.add(digest)

    def put_head(self, envelope: bytes, previous: bytes | None) -> None:
        origin = self._origin
        if origin.envelope != previous:
            raise RefusedError("another publisher changed it meanwhile")
        taken = origin.loses(decoded(envelope))
        if taken is not False:
            origin.envelope = envelope
            origin.heads.append(decoded(envelope))
        if taken is not None:
            origin.lost += 1
            raise NetworkError("connection reset")


class Told(SilentObserver):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def noticed(self, message: str) -> None:
        self.notices.append(message)


@pytest.fixture
def watch() -> Told:
    return Told()


@pytest.fixture
def origin() -> FakeOrigin:
    return FakeOrigin()


Publish = Callable[[PublishOptions], Published]


@pytest.fixture
def publish(
    origin: FakeOrigin, signer: Signer, clock: Clock, watch: Told, tmp_path: Path
) -> Publish:
    memory = Store(tmp_path / "memory").run("default", create=True)
    cache = Store(tmp_path / "cache").run("default", create=True)
    return lambda options: publish_remote(
        options, memory, origin.client, [signer], clock, watch, cache
    )


@pytest.fixture
def streamed(checkpoint: Path) -> PublishOptions:
    return PublishOptions(source=checkpoint, threads=1, stream=AT_ONCE, delta=False)


def once(wanted: Callable[[Head], bool], taken: bool) -> Callable[[Head], bool | None]:
    """Lose the answer to the first such head."""
    left = [taken]
    return lambda head: left.pop() if left and wanted(head) else None


def is_open(head: Head) -> bool:
    return head.open is not None


def is_whole(head: Head) -> bool:
    return head.open is None


@pytest.mark.parametrize("taken", [TAKEN, LOST])
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_streamed_head_without_an_answer_costs_the_stream_at_most(
    origin: FakeOrigin,
    publish: Publish,
    streamed: PublishOptions,
    watch: Told,
    *,
    taken: bool,
    deaf: int,
) -> None:
    origin.loses, origin.deaf = once(is_open, taken), deaf

    done = publish(streamed)

    assert origin.lost == 1
    assert (origin.head.version, origin.head.open) == (done.ref.version, None) == (1, None)
    sequences = [head.sequence for head in origin.heads]
    assert sequences == sorted(set(sequences))
    stopped = [note for note in watch.notices if "announced once it is whole" in note]
    assert bool(stopped) == (deaf == 1 or not taken)
    assert publish(streamed).ref.version == 2  # the memory follows the origin


@pytest.mark.parametrize("lost", [1, 2])
def test_a_last_head_that_was_taken_counts(
    origin: FakeOrigin, publish: Publish, streamed: PublishOptions, lost: int
) -> None:
    """Also after an answer to a streamed one was lost, and that one was not taken."""
    first, last = once(is_open, LOST), once(is_whole, TAKEN)
    origin.loses = last if lost == 1 else lambda head: first(head) if is_open(head) else last(head)

    done = publish(streamed)

    assert origin.lost == lost
    assert origin.head.newest() == done.ref
    assert len([head for head in origin.heads if head.version == 1]) == 1
    assert publish(streamed).ref.version == 2


@pytest.mark.parametrize("deaf", [0, 9])
def test_a_last_head_of_which_nothing_is_known_is_no_success(
    origin: FakeOrigin, publish: Publish, streamed: PublishOptions, deaf: int
) -> None:
    origin.loses, origin.deaf = once(is_whole, LOST), deaf
    with pytest.raises(NetworkError, match="reset; it may have taken the head all the same"):
        publish(streamed)
    origin.deaf = 0
    done = publish(streamed)
    assert (origin.head.version, origin.head.open) == (done.ref.version, None)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("stream", [None, AT_ONCE], ids=["whole", "open"])
def test_a_head_that_the_origin_lost_with_its_power_does_not_lend_its_number(
    origin: FakeOrigin,
    publish: Publish,
    streamed: PublishOptions,
    checkpoint: Path,
    signer: Signer,
    clock: Clock,
    *,
    changes: bool,
    stream: Pace | None,
) -> None:
    """Somebody read it. The same files may have the number again: they are the same version."""
    origin.loses, origin.deaf = lambda head: TAKEN, 99
    with pytest.raises(ShardcastError):
        publish(replace(streamed, stream=stream))
    (read,) = origin.heads
    assert (read.open is None) == (stream is None)
    reader = trust.fresh(read.run, [signer.public_key])
    reader = trust.accept(reader, origin.envelope or b"", clock()).state
    rebooted = replace(origin, envelope=None, deaf=0, loses=lambda head: None)
    vars(origin).update(vars(rebooted))
    if changes:
        (checkpoint / "config.json").write_text("changed")

    done = publish(streamed)

    assert done.ref.version == (2 if changes else 1)
    trust.accept(reader, origin.envelope or b"", clock())


def test_a_version_that_may_be_open_is_given_up(
    origin: FakeOrigin, publish: Publish, streamed: PublishOptions, checkpoint: Path
) -> None:
    def lose(head: Head) -> bool | None:
        if is_open(head) and not origin.lost:
            (checkpoint / "config.json").write_text("changed meanwhile")
            return TAKEN
        return None

    origin.loses, origin.deaf = lose, 1
    with pytest.raises(ModifiedError):
        publish(streamed)
    assert origin.deaf == 0
    assert [is_open(head) for head in origin.heads] == [True, False]


def test_a_head_of_another_publisher_is_not_taken_for_ours(
    origin: FakeOrigin, publish: Publish, streamed: PublishOptions, signer: Signer
) -> None:
    def lose(head: Head) -> bool | None:
        if is_open(head):
            issue = succession.Issue(run=head.run, now_ms=head.issued_at, keys=(signer.public_key,))
            origin.envelope = seal(encode_head(succession.first_head(issue)), [signer])
            return LOST
        return None

    origin.loses = lose
    with pytest.raises(RefusedError, match="another publisher"):
        publish(streamed)
    assert origin.heads == []


@pytest.mark.parametrize("deaf", [0, 9])
def test_a_change_of_the_head_whose_answer_is_lost(
    origin: FakeOrigin,
    publish: Publish,
    streamed: PublishOptions,
    signer: Signer,
    clock: Clock,
    tmp_path: Path,
    deaf: int,
) -> None:
    publish(streamed)
    memory = RunStore(tmp_path / "memory" / "default", "default")

    def hold() -> Head:
        return amend_remote(
            memory,
            origin.client(),
            [signer],
            clock,
            lambda head, issue: succession.with_hold(head, issue, hold=True),
        )

    origin.loses, origin.deaf = once(lambda head: head.hold, TAKEN), deaf
    if deaf:
        with pytest.raises(NetworkError, match="all the same"):
            hold()
        origin.deaf = 0
        assert hold().sequence > origin.heads[-2].sequence
    else:
        assert hold() == origin.head
    assert origin.head.hold


# --- after the announcement ---------------------------------------------------------------------


@pytest.fixture
def second(tmp_path: Path, publish: Publish) -> PublishOptions:
    """A second version, which gets a compressed copy after it was announced."""
    source = tmp_path / "model"
    model = make_model(1)
    write_model(source / "model.safetensors", model)
    options = PublishOptions(source=source, threads=1, stream=None, compress=True)
    publish(replace(options, compress=False))
    write_model(source / "model.safetensors", step(model, 2, 0.05))
    return options


def has_copy(head: Head) -> bool:
    newest = head.newest()
    return newest is not None and any(delta.base is None for delta in newest.deltas)


@pytest.mark.parametrize("deaf", [0, 9])
def test_further_deltas_whose_head_has_no_answer(
    origin: FakeOrigin, publish: Publish, second: PublishOptions, watch: Told, deaf: int
) -> None:
    origin.loses, origin.deaf = once(has_copy, TAKEN), deaf
    done = publish(second)
    assert has_copy(origin.head)
    assert (origin.head.newest() == done.ref) == (deaf == 0)
    assert bool([note for note in watch.notices if "no further deltas" in note]) == (deaf > 0)
    origin.deaf = 0
    assert publish(second).ref.version == 3


@pytest.mark.parametrize("error", [DiskFullError("no space"), ModifiedError("a blob changed")])
@pytest.mark.parametrize("where", ["commit", "blob"])
def test_trouble_after_the_announcement_is_said_and_is_no_failure(
    origin: FakeOrigin,
    publish: Publish,
    second: PublishOptions,
    watch: Told,
    monkeypatch: pytest.MonkeyPatch,
    error: ShardcastError,
    where: str,
) -> None:
    def fail(*_: object) -> None:
        if where == "commit" or (origin.heads and origin.head.version == 2):
            raise error

    with monkeypatch.context() as patch:
        if where == "commit":
            patch.setattr(RunStore, "commit", fail)
        else:
            origin.before_blob = fail
        done = publish(second)
    assert origin.head.newest() == done.ref
    assert done.ref.version == 2
    assert [note for note in watch.notices if f"no further deltas: {error}" in note]
    origin.before_blob = lambda digest: None
    again = publish(second)
    assert again.ref.version == 3
    assert [delta.base_version for delta in again.ref.deltas if delta.base] == [2]


@pytest.mark.parametrize("name", ["pending.json", "trust.json"])
def test_memory_that_cannot_be_written_after_the_announcement_is_no_failure(
    origin: FakeOrigin,
    publish: Publish,
    streamed: PublishOptions,
    watch: Told,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The next publication begins from what the origin has."""
    streamed = replace(streamed, stream=None)
    real_replace, real_unlink = os.replace, os.unlink

    def refuse(path: str | os.PathLike[str]) -> None:
        if origin.heads and Path(path).name == name:
            raise OSError(5, "Input/output error", str(path))

    def replacing(old: Path, new: Path) -> None:
        refuse(new)
        real_replace(old, new)

    def unlinking(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
        refuse(path)
        real_unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replacing)
        patch.setattr(os, "unlink", unlinking)
        done = publish(streamed)
    assert origin.head.newest() == done.ref
    if name == "pending.json":
        assert [note for note in watch.notices if "Input/output error" in note]
    assert publish(streamed).ref.version == 2
