"""Followers and open versions: fetched ahead, verified, and never run before they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shardcast.errors import DiskFullError
from shardcast.events import EventKind
from shardcast.protocol import succession
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenDeltaRef, OpenRef, VersionRef
from shardcast.protocol.layout import encode_part
from shardcast.protocol.manifest import Version
from shardcast.store.run import RunStore
from tests.deltas import checkpoint, layout_of, make_delta, stepped
from tests.fakes import KIB, FakeRun, RunServer
from tests.unit.worker.conftest import some_bytes
from tests.unit.worker.test_follow import PATIENT, Following
from tests.unit.worker.test_pull import assert_is

SHARD = 256 * KIB


class Streamed:
    """A version that a publisher announces little by little.

    Attributes:
        ref: What the head will say of it once it is whole.
        shards: The digests of its shards.
    """

    def __init__(self, run: FakeRun, number: int, files: dict[str, bytes]) -> None:
        self.run = run
        self.number = number
        self.ref: VersionRef = run.add_version(number, files)
        self.shards = [
            digest_of(data[at : at + SHARD])
            for data in files.values()
            for at in range(0, len(data), SHARD)
        ]
        self.layout = layout_of(run, self.ref)[0]
        self.parts: list[str] = []
        self.deltas: list[OpenDeltaRef] = []

    def list_shards(self, shards: range, digests: Sequence[str] | None = None) -> None:
        """List some shards, by these digests."""
        named = list(digests or self.shards[shards.start : shards.stop])
        part = encode_part(self.layout, shards.start, named)
        self.run.blobs[digest_of(part)] = part
        self.parts.append(digest_of(part))
        self.announce()

    def announce(self) -> None:
        """Announce what is listed."""
        opened = OpenRef(
            version=self.number,
            step=None,
            layout=self.layout,
            parts=list(self.parts),
            deltas=list(self.deltas),
        )
        self.run.amend(open=opened)

    def close(self, **changes: object) -> None:
        """Announce that it is whole."""
        ref = msgspec.structs.replace(self.ref, **changes)
        self.run.announce(succession.with_version(self.run.head, self.run._issue(), ref, keep=16))


@pytest.fixture
async def follow(tmp_path: Path, server: RunServer) -> AsyncIterator[Callable[[], Following]]:
    made: list[Following] = []

    def start(run: FakeRun | None = None) -> Following:
        made.append(
            Following(tmp_path / "out", next(iter(server.runs.values())), server, config=PATIENT)
        )
        return made[-1]

    yield start
    for following in made:
        await following.stop()


def fresh(size: int, seed: int) -> bytes:
    """Bytes that no other version has."""
    return some_bytes(size, 1000 + seed)


def sent(server: RunServer, digests: Sequence[str]) -> list[int]:
    """How many bytes of each blob were sent."""
    return [server.sent[digest] for digest in digests]


async def here(out: Path, number: int, shards: set[int]) -> None:
    """Wait until these shards of a version are staged, verified and recorded."""
    for _ in range(2000):
        stored = RunStore(out, "policy").stored(number)
        if stored is not None and shards <= stored.present():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"shards {shards} of version {number} never came")


def asked(server: RunServer, digest: str) -> bool:
    """Whether a blob was asked for."""
    return digest in server.blob_requests


def only_first_is_current(out: Path, following: Following) -> None:
    store = RunStore(out, "policy")
    assert store.current() == 1
    assert store.committed() == [1]
    assert [e.version for e in following.log.of(EventKind.READY)] == [1]


async def test_an_open_version_is_fetched_and_not_run_until_it_is_closed(
    tmp_path: Path, run: FakeRun, server: RunServer, follow: Callable[[], Following]
) -> None:
    out, following = tmp_path / "out", follow()
    await following.update()
    coming = Streamed(run, 2, {"model": fresh(8 * SHARD, 2)})
    coming.list_shards(range(3))
    await here(out, 2, {0, 1, 2})
    only_first_is_current(out, following)
    coming.list_shards(range(5, 8))
    coming.list_shards(range(3, 5))
    await here(out, 2, set(range(8)))  # all of it is here: still nobody said that it is whole
    only_first_is_current(out, following)
    heads = len(following.log.of(EventKind.HEAD))
    run.amend()
    await following.event(EventKind.HEAD, heads + 1)
    only_first_is_current(out, following)
    coming.close()
    update = await following.update()
    assert_is(update, run, 2)
    assert sent(server, coming.shards) == [SHARD] * 8
    ready = following.log.of(EventKind.READY)[-1]
    assert ready.bytes_ahead is not None
    assert ready.bytes_fetched is not None
    assert 8 * SHARD < ready.bytes_ahead < ready.bytes_fetched == update.bytes_fetched
    assert ready.bytes_fetched < 8 * SHARD + 16 * KIB


async def test_the_first_version_of_a_run_streams_too(
    tmp_path: Path, follow: Callable[[], Following], run: FakeRun, server: RunServer
) -> None:
    empty = FakeRun()
    server.runs[empty.name] = empty
    coming = Streamed(empty, 1, {"model": fresh(4 * SHARD, 2)})
    following = follow()
    coming.list_shards(range(2))
    await here(tmp_path / "out", 1, {0, 1})
    assert RunStore(tmp_path / "out", "policy").current() is None
    coming.close()
    assert_is(await following.update(), empty, 1)
    assert sent(server, coming.shards) == [SHARD] * 4


async def test_a_version_that_vanishes_is_a_source_for_the_next_one(
    tmp_path: Path, run: FakeRun, server: RunServer, follow: Callable[[], Following]
) -> None:
    out, following = tmp_path / "out", follow()
    await following.update()
    data = fresh(6 * SHARD, 2)
    lost = Streamed(run, 2, {"model": data})
    lost.list_shards(range(4))
    await here(out, 2, {0, 1, 2, 3})
    run.amend(open=None)  # its publisher was killed, and another one begins
    again = Streamed(run, 3, {"renamed": data})
    again.list_shards(range(6))
    await here(out, 3, {4, 5})
    only_first_is_current(out, following)
    again.close()
    assert_is(await following.update(), run, 3)
    assert sent(server, again.shards) == [SHARD] * 6
    assert RunStore(out, "policy").staged() == []


async def test_versions_that_keep_vanishing_cost_a_bounded_waste(
    tmp_path: Path, run: FakeRun, server: RunServer, follow: Callable[[], Following]
) -> None:
    out, following = tmp_path / "out", follow()
    await following.update()
    made = []
    for number in (2, 3, 4):
        made.append(Streamed(run, number, {"model": fresh(4 * SHARD, number)}))
        shards = range(2 if number == 2 else 4)
        made[-1].list_shards(shards)
        if number < 4:
            await here(out, number, set(shards))
    # More than a copy is lost: of the next one only the documents are looked at.
    await asyncio.to_thread(server.wait_for, lambda: made[-1].parts[0] in server.blob_requests)
    run.amend(open=None)
    final = Streamed(run, 5, {"model": fresh(4 * SHARD, 5)})
    final.close()
    assert_is(await following.update(), run, 5)
    assert sent(server, made[-1].shards) == [0] * 4
    after = Streamed(run, 6, {"model": fresh(4 * SHARD, 6)})
    after.list_shards(range(4))
    await here(out, 6, set(range(4)))  # a version was reached: that counts anew


async def test_a_part_that_lies_cannot_get_into_a_version(
    tmp_path: Path, run: FakeRun, server: RunServer, follow: Callable[[], Following]
) -> None:
    out, following = tmp_path / "out", follow()
    await following.update()
    coming = Streamed(run, 2, {"model": fresh(4 * SHARD, 2)})
    wrong = fresh(SHARD, 99)
    run.blobs[digest_of(wrong)] = wrong
    coming.list_shards(range(2), [coming.shards[0], digest_of(wrong)])
    await here(out, 2, {0, 1})  # as the signed part says
    coming.close()
    assert_is(await following.update(), run, 2)
    assert sent(server, [*coming.shards, digest_of(wrong)]) == [SHARD] * 5


async def test_a_part_that_does_not_belong_is_not_used(
    tmp_path: Path, run: FakeRun, server: RunServer, follow: Callable[[], Following]
) -> None:
    """Overlapping parts: nothing of the open version is fetched; what closes is."""
    following = follow()
    await following.update()
    coming = Streamed(run, 2, {"model": fresh(4 * SHARD, 2)})
    part = encode_part(coming.layout, 0, coming.shards[:2])
    run.blobs[digest_of(part)] = part
    coming.parts.append(digest_of(part))
    coming.list_shards(range(1, 4))
    await asyncio.to_thread(server.wait_for, lambda: coming.parts[1] in server.blob_requests)
    heads = len(following.log.of(EventKind.HEAD))
    run.amend()
    await following.event(EventKind.HEAD, heads + 1)
    assert sent(server, coming.shards) == [0] * 4
    coming.close()
    assert_is(await following.update(), run, 2)


async def test_who_holds_the_base_waits_for_the_delta_that_is_promised(
    tmp_path: Path, server: RunServer, follow: Callable[[], Following]
) -> None:
    run = FakeRun()
    server.runs[run.name] = run
    old = checkpoint(1)
    base = run.publish(old)
    following = follow()
    await following.update()
    coming = Streamed(run, 2, stepped(old, 2))
    changed = [d for d in coming.shards if d not in run.shard_digests(1)]
    made = make_delta(run, coming.ref, base)
    promised = OpenDeltaRef(base=base.manifest, base_version=1, parts=[])
    coming.deltas = [promised]
    coming.list_shards(range(4))
    coming.list_shards(range(4, len(coming.shards)))
    await asyncio.to_thread(server.wait_for, lambda: coming.parts[1] in server.blob_requests)
    coming.deltas = [msgspec.structs.replace(promised, parts=made.parts)]
    coming.announce()
    await asyncio.to_thread(server.wait_for, lambda: set(made.blobs) <= set(server.blob_requests))
    assert sent(server, changed) == [0] * len(changed)
    coming.close(deltas=[made.ref])
    update = await following.update()
    assert_is(update, run, 2)
    assert sent(server, changed) == [0] * len(changed)
    assert [server.sent[blob] for blob in made.blobs] == [len(run.blobs[b]) for b in made.blobs]
    ready = following.log.of(EventKind.READY)[-1]
    assert ready.bytes_delta == sum(len(run.blobs[b]) for b in made.blobs)
    assert following.log.of(EventKind.DELTA_FAILED) == []


async def test_shards_are_fetched_if_the_delta_is_not_promised_any_more(
    tmp_path: Path, server: RunServer, follow: Callable[[], Following]
) -> None:
    run = FakeRun()
    server.runs[run.name] = run
    old = checkpoint(1)
    base = run.publish(old)
    following = follow()
    await following.update()
    coming = Streamed(run, 2, stepped(old, 2))
    coming.deltas = [OpenDeltaRef(base=base.manifest, base_version=1, parts=[])]
    coming.list_shards(range(2))
    await asyncio.to_thread(server.wait_for, lambda: coming.parts[0] in server.blob_requests)
    coming.deltas = []
    coming.announce()
    await here(tmp_path / "out", 2, {0, 1})
    coming.close()
    assert_is(await following.update(), run, 2)


async def test_delta_parts_that_grow_are_each_fetched_once(
    tmp_path: Path, server: RunServer, follow: Callable[[], Following]
) -> None:
    """A frame's shards are rebuilt as soon as its part is listed, not when all of them are."""
    run = FakeRun()
    server.runs[run.name] = run
    old = checkpoint(1)
    base = run.publish(old)
    following = follow()
    await following.update()
    coming = Streamed(run, 2, stepped(old, 2))
    whole = make_delta(run, coming.ref, base, blob_frames=1)
    part = msgspec.json.decode(run.blobs[whole.parts[0]])
    first, parts = 0, []
    for blob in part["blobs"]:
        data = msgspec.json.encode({**part, "first_shard": first, "blobs": [blob]})
        run.blobs[digest_of(data)] = data
        parts.append(digest_of(data))
        first += sum(count for count, _ in blob["frames"])
    coming.deltas = [OpenDeltaRef(base=base.manifest, base_version=1, parts=[])]
    coming.list_shards(range(len(coming.shards)))
    for count in range(1, len(parts) + 1):
        listed = parts[:count]
        coming.deltas = [OpenDeltaRef(base=base.manifest, base_version=1, parts=listed)]
        coming.announce()
        await asyncio.to_thread(server.wait_for, partial(asked, server, listed[-1]))
        await here(tmp_path / "out", 2, set(range(min(2 * count, 6))))
    only_first_is_current(tmp_path / "out", following)
    coming.close(deltas=[whole.ref])
    assert_is(await following.update(), run, 2)
    assert [server.blob_requests.count(digest) for digest in parts] == [1] * len(parts)


async def test_a_file_that_did_not_change_is_a_link_although_its_place_was_reserved(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    files: dict[str, bytes],
    follow: Callable[[], Following],
) -> None:
    out, following = tmp_path / "out", follow()
    await following.update()
    name = "model-00001-of-00002.safetensors"
    coming = Streamed(run, 2, {**files, "model-00002-of-00002.safetensors": fresh(SHARD, 3)})
    coming.list_shards(range(4, 5))
    await here(out, 2, {4})
    reserved = (out / "state" / "staging" / "000002" / name).stat()
    assert reserved.st_size == len(files[name])
    assert reserved.st_nlink == 1
    coming.close()
    assert_is(await following.update(), run, 2)
    one, two = (out / "versions" / number / name for number in ("000001", "000002"))
    assert one.stat().st_ino == two.stat().st_ino
    assert not list((out / "state" / "tmp").glob("*"))


async def test_a_disk_without_room_costs_the_head_start_only(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    follow: Callable[[], Following],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    following = follow()
    await following.update()
    tries: list[int] = []

    def full(version: Version, directory: Path) -> None:
        tries.append(version.number)
        raise DiskFullError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shardcast.obtain.make_files", full)
        coming = Streamed(run, 2, {"model": fresh(4 * SHARD, 2)})
        coming.list_shards(range(2))
        await asyncio.to_thread(server.wait_for, lambda: coming.parts[0] in server.blob_requests)
        coming.list_shards(range(2, 4))
        heads = len(following.log.of(EventKind.HEAD))
        run.amend()
        await following.event(EventKind.HEAD, heads + 1)
    coming.close()
    assert_is(await following.update(), run, 2)
    assert sent(server, coming.shards) == [SHARD] * 4
    assert tries == [2]
