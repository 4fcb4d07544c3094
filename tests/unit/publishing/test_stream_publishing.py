"""A local publication that streams: what its heads say, and that it ends as one that does not."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardcast import stream_publishing
from shardcast.announcing import announce
from shardcast.delta_making import DeltaMaker
from shardcast.errors import DiskFullError, ModifiedError
from shardcast.protocol import trust
from shardcast.protocol.delta import DeltaPart, assemble_deltas, decode_delta_part
from shardcast.protocol.envelope import Signer
from shardcast.protocol.head import DeltaRef, OpenRef
from shardcast.publisher import publish_directory
from shardcast.publishing import Published, PublishObserver, PublishOptions, SilentObserver
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability, ShardState
from shardcast.streaming import Pace
from tests.models import make_model, step, write_model
from tests.streams import AT_ONCE, StepByStep, head_in, listed_in, open_in, wait_for
from tests.tree import contents_of
from tests.unit.publishing.conftest import Clock


def options(checkpoint: Path, **others: Any) -> PublishOptions:
    return PublishOptions(
        **{"source": checkpoint, "threads": 1, "stream": AT_ONCE, "delta": False, **others}
    )


def published(
    run: RunStore, signer: Signer, clock: Clock, watch: PublishObserver, how: PublishOptions
) -> Published:
    return publish_directory(how, run, [signer], clock, watch)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("durability", list(Durability))
def test_a_version_that_streams_grows_and_closes_as_one_that_does_not(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    tmp_path: Path,
    *,
    link: bool,
    durability: Durability,
) -> None:
    watch = StepByStep(run)
    how = options(checkpoint, link=link, durability=durability)
    done = published(run, signer, clock, watch, how)
    assert [len(listed) for listed in watch.listed] == list(range(6))
    assert {(opened.version, opened.layout) for opened in watch.seen} == {(1, watch.seen[0].layout)}
    assert done.streamed >= 6
    head = head_in(run)
    assert head is not None
    assert (head.version, head.open) == (1, None)
    assert done.path is not None
    assert contents_of(done.path) == contents_of(checkpoint)
    stored = RunStore(run.root, run.run).stored(1)
    assert stored is not None
    assert stored.complete
    assert all(stored.confirm(shard) for shard in range(6))
    # The parts that it closed with name the same digests, in fewer parts; the layout is the same.
    for shard, digest in watch.listed[-1].items():
        assert stored.version.digests[shard] == digest
    assert stored.version.layout_digest == watch.seen[0].layout
    assert len(stored.version.documents) == 3
    # Readers that followed all along accept the last head.
    state = run.read_trust()
    assert state is not None
    assert state.layouts == {1: watch.seen[0].layout}
    trust.check_version(state, stored.version)


def test_what_a_head_lists_can_be_read_beside_the_publisher(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    reader = RunStore(run.root, run.run)
    read: list[int] = []

    class Reading(StepByStep):
        def reached(self, shards: int) -> None:
            opened = open_in(reader)
            assert opened is not None
            version = reader.load_open(opened)
            assert version is not None
            stored = reader.followed(version)
            assert stored is not None
            assert stored.present() == set(range(shards))
            assert all(stored.confirm(shard) for shard in range(shards))
            assert all(stored.state(s) is ShardState.VERIFIED for s in range(shards))
            read.append(shards)

    published(run, signer, clock, Reading(run), options(checkpoint))
    assert read == list(range(6))
    # Once it is closed it is held open once, not once more by whoever followed it.
    run.close()
    stored = reader.stored(1)
    assert stored is not None
    assert stored.alive
    assert len(descriptors_of(stored.directory)) <= 1
    reader.close()
    assert descriptors_of(stored.directory) == []


def descriptors_of(directory: Path) -> list[str]:
    """The descriptors of this process that are this directory."""
    wanted = directory.resolve()
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if descriptor.readlink() == wanted:
                found.append(descriptor.name)
    return found


@pytest.mark.parametrize("pace", [None, Pace(first_s=math.inf)], ids=["off", "small"])
def test_a_version_that_does_not_stream_is_announced_once(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock, pace: Pace | None
) -> None:
    sequences: set[int] = set()

    class Looking(StepByStep):
        def hashed(self, count: int) -> None:
            assert head_in(run) is None

    done = published(run, signer, clock, Looking(run), options(checkpoint, stream=pace))
    head = head_in(run)
    assert head is not None
    sequences.add(head.sequence)
    assert done.streamed == 0
    assert len(sequences) == 1


def test_a_publication_that_fails_says_that_its_version_is_not_open_any_more(
    checkpoint: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    first = published(run, signer, clock, StepByStep(run), options(checkpoint))

    class Meddling(StepByStep):
        def reached(self, shards: int) -> None:
            if shards == 4:
                (checkpoint / "config.json").write_text("changed")

    watch = Meddling(run)
    with pytest.raises(ModifiedError):
        published(run, signer, clock, watch, options(checkpoint))
    assert watch.seen[-1].version == 2
    head = head_in(run)
    assert head is not None
    assert (head.version, head.open) == (first.ref.version, None)
    assert run.staged() == []
    # Its number is never used again: readers know it by its layout.
    again = published(run, signer, clock, StepByStep(run), options(checkpoint))
    assert again.ref.version == 3


class Killed(BaseException):
    """Nothing that the publisher tidies up after: as good as SIGKILL for the disk."""


def abandoned(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> OpenRef:
    """Leave what a publisher leaves that is killed after three shards were announced."""
    from shardcast import staging

    class Dying(StepByStep):
        def reached(self, shards: int) -> None:
            if shards == 3:
                raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(staging, "take_back", lambda run, number: None)
        patch.setattr(stream_publishing, "give_up_open", lambda *_: None)
        with pytest.raises(Killed):
            published(run, signer, clock, Dying(run), options(checkpoint))
    opened = open_in(run)
    assert opened is not None
    return opened


@pytest.mark.parametrize("pace", [None, AT_ONCE], ids=["at-once", "streamed"])
def test_the_next_publication_gives_up_what_a_killed_one_left_open(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    pace: Pace | None,
) -> None:
    left = abandoned(checkpoint, run, signer, clock, monkeypatch)
    assert run.staged() == [left.version] == [1]
    assert len(listed_in(run, left)) == 3
    again = RunStore(run.root, run.run)

    class Looking(StepByStep):
        def reached(self, shards: int) -> None:
            assert again.staged() == [2]  # what was left makes room first

        def hashed(self, count: int) -> None:
            if pace is not None:
                super().hashed(count)

    done = published(again, signer, clock, Looking(again), options(checkpoint, stream=pace))
    assert done.ref.version == 2
    head = head_in(again)
    assert head is not None
    assert (head.version, head.open) == (2, None)
    assert again.staged() == []
    assert sorted(again.committed()) == [2]
    named = again.stored(2)
    assert named is not None
    assert set(again.blobs()) == set(named.version.documents)


def test_a_number_is_not_used_again_although_trust_was_not_written(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between a head and its trust, twice: readers have seen the number with another layout."""
    abandoned(checkpoint, run, signer, clock, monkeypatch)
    (run.root / "state" / "trust.json").unlink()
    again = RunStore(run.root, run.run)

    class Dying(StepByStep):
        def hashed(self, count: int) -> None:
            raise Killed

    with pytest.raises(Killed):
        published(again, signer, clock, Dying(again), options(checkpoint, stream=None))
    assert open_in(again) is None
    done = published(again, signer, clock, StepByStep(again), options(checkpoint))
    assert done.ref.version == 2


def test_trouble_with_streaming_costs_the_stream_and_not_the_version(
    checkpoint: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = announce
    heads: list[int] = []

    def full(*arguments: Any) -> bytes:
        heads.append(len(heads))
        if len(heads) > 2:
            raise DiskFullError("no space left on device")
        return real(*arguments)

    monkeypatch.setattr(stream_publishing, "announce", full)
    watch = StepByStep(run, until=1)
    done = published(run, signer, clock, watch, options(checkpoint))
    assert done.ref.version == 1
    assert len(heads) == 3
    assert [m for m in watch.notices if "announced once it is whole: no space" in m]
    head = head_in(run)
    assert head is not None
    assert (head.version, head.open) == (1, None)


MIB = 1 << 20


class RunByRun(StepByStep):
    """Waits in each run of 16 MiB until a head lists the delta of the runs before it."""

    def __init__(self, run: RunStore) -> None:
        super().__init__(run)
        self.bytes = 0
        self.parts: list[DeltaPart] = []

    def hashed(self, count: int) -> None:
        self.bytes += count
        runs = (self.bytes - 1) // (16 * MIB)
        wait_for(lambda: self.frames() >= runs, f"{runs} frames in a head")

    def frames(self) -> int:
        opened = open_in(self._run)
        if opened is None:
            return 0
        if not self.seen or self.seen[-1] != opened:
            self.seen.append(opened)
            self.parts = delta_parts(self._run, opened)
        return sum(len(blob.frames) for part in self.parts for blob in part.blobs)


def delta_parts(run: RunStore, opened: OpenRef) -> list[DeltaPart]:
    digests = [digest for delta in opened.deltas for digest in delta.parts]
    return [decode_delta_part(run.read_blob(digest) or b"") for digest in digests]


def test_a_delta_streams_and_closes_with_the_same_blobs(
    tmp_path: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    source = tmp_path / "model"
    model = make_model(1, elements=6_000_000)
    write_model(source / "model.safetensors", model)
    published(run, signer, clock, SilentObserver(), options(source, delta=True, stream=None))
    write_model(source / "model.safetensors", step(model, 2, 0.05))
    watch = RunByRun(run)
    done = published(run, signer, clock, watch, options(source, delta=True))
    (delta,) = done.deltas
    assert watch.frames() == 0  # it is closed
    assert all(
        [(d.base, d.base_version) for d in opened.deltas] == [(delta.ref.base, 1)]
        for opened in watch.seen
    )
    stored = run.stored(2)
    assert stored is not None
    parts = watch.parts
    assert len(parts) >= 2
    assert sum(len(blob.frames) for part in parts for blob in part.blobs) == 2
    for part in parts:
        assert (part.base, part.layout) == (delta.ref.base, stored.version.layout_digest)
    listed = DeltaRef(base=delta.ref.base, base_version=1, parts=[], bytes=delta.ref.bytes)
    assemble_deltas(listed, stored.version.layout_digest, stored.version.layout, parts)
    told = {blob.digest: blob.bytes for part in parts for blob in part.blobs}
    assert told.items() <= delta.blobs.items()


def test_a_delta_that_fails_is_not_promised_any_more(
    tmp_path: Path,
    run: RunStore,
    signer: Signer,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers with a base wait for the delta that a head promises."""
    source = tmp_path / "model"
    model = make_model(1, elements=6_000_000)
    write_model(source / "model.safetensors", model)
    published(run, signer, clock, SilentObserver(), options(source, delta=True, stream=None))
    write_model(source / "model.safetensors", step(model, 2, 0.05))

    class Waiting(RunByRun):
        def hashed(self, count: int) -> None:
            self.bytes += count
            if self.bytes > 33 * MIB:
                wait_for(lambda: self.promised() == [], "no delta in the head")

        def promised(self) -> list[str | None] | None:
            opened = open_in(self._run)
            return None if opened is None else [delta.base for delta in opened.deltas]

    def full(self: DeltaMaker, blobs: Sequence[tuple[str, bytes]]) -> None:
        if blobs:
            raise DiskFullError("no space left on device")

    monkeypatch.setattr(DeltaMaker, "_keep_all", full)
    done = published(run, signer, clock, Waiting(run), options(source, delta=True))
    assert done.deltas == ()
    assert done.streamed


def test_a_delta_that_brings_little_is_not_promised(
    tmp_path: Path, run: RunStore, signer: Signer, clock: Clock
) -> None:
    """Another model under the same name: whoever waited for its delta would wait for nothing."""
    source = tmp_path / "model"
    write_model(source / "model.safetensors", make_model(1, elements=6_000_000))
    published(run, signer, clock, SilentObserver(), options(source, delta=True, stream=None))
    (source / "model.safetensors").write_bytes(random.Random(3).randbytes(36 * MIB))

    class Waiting(RunByRun):
        def hashed(self, count: int) -> None:
            self.bytes += count
            if self.bytes > 17 * MIB:
                wait_for(lambda: self.promised() == [], "no delta in the head")

        def promised(self) -> list[str | None] | None:
            opened = open_in(self._run)
            return None if opened is None else [delta.base for delta in opened.deltas]

    done = published(run, signer, clock, Waiting(run), options(source, delta=True))
    assert done.streamed
