"""What is known of versions that are being uploaded, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relay import publishing
from relay.publishing import Publishing
from relay.runs import RelayRun
from relay.upload import decode_any
from relay.uploads import UNNAMED_S, Uploads
from relay.whole import to_its_end
from shardcast.errors import BusyError
from shardcast.protocol import trust
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenRef
from shardcast.protocol.manifest import encode_manifest
from shardcast.store.retention import unnamed_lock
from shardcast.store.run import RunStore
from tests.clock import Clock
from tests.contract.made import RUN, MadeVersion, make_head, make_version, signer

VERSION = make_version(1)
LATER = make_version(2)


@pytest.fixture
def run(tmp_path: Path) -> RelayRun:
    return RelayRun(RunStore(tmp_path, RUN))


def serve(run: RelayRun, *versions: MadeVersion, opened: OpenRef | None = None) -> None:
    state = run.trust or trust.fresh(RUN, [signer().public_key])
    envelope = make_head(*versions, opened=opened)
    run.serve(trust.accept(state, envelope, 2 * 10**12))


async def register(uploads: Uploads, version: MadeVersion, *digests: str) -> None:
    for digest in digests:
        uploads.run.store.write_blob(digest, version.blobs[digest])
        await uploads.register(digest, decode_any(version.blobs[digest]))


async def cancelled_while(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], asyncio.Task[Any]]
) -> None:
    """Cancel a task, several times, while a version is staged for it."""
    staging, go_on, stage = asyncio.Event(), threading.Event(), RunStore.stage
    loop = asyncio.get_running_loop()

    def slowly(self: RunStore, *args: Any, **options: Any) -> Any:
        loop.call_soon_threadsafe(staging.set)
        assert go_on.wait(20)
        return stage(self, *args, **options)

    monkeypatch.setattr(RunStore, "stage", slowly)
    task = start()
    async with asyncio.timeout(20):
        await staging.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    monkeypatch.setattr(RunStore, "stage", stage)


async def test_a_part_whose_sender_went_away_is_wholly_known(
    run: RelayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(run, 2, Clock())
    await register(uploads, VERSION, VERSION.layout)
    part = VERSION.parts[0]
    await cancelled_while(
        monkeypatch, lambda: asyncio.create_task(register(uploads, VERSION, part))
    )
    assert uploads.knows(part)
    for n, digest in enumerate(VERSION.shards):
        place = uploads.shard(digest)
        assert place is not None
        assert place[1] == n
    await uploads.close()


async def test_a_document_that_breaks_its_registration_is_not_known(
    run: RelayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: sent again, it is registered again."""
    uploads = Uploads(run, 2, Clock())
    await register(uploads, VERSION, VERSION.layout, *VERSION.parts, VERSION.ref.manifest)

    def broken(*_args: Any, **_options: Any) -> Any:
        raise ZeroDivisionError

    other = make_version(2)
    manifest = encode_manifest(VERSION.layout, ["a" * 64])
    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "stage", broken)
        with pytest.raises(ZeroDivisionError):
            await register(uploads, other, other.layout)
        with pytest.raises(ZeroDivisionError):
            await uploads.register(digest_of(manifest), decode_any(manifest))
    assert not uploads.knows(other.layout)
    assert not uploads.knows(digest_of(manifest))
    assert uploads.knows(VERSION.ref.manifest)
    await register(uploads, other, other.layout)
    assert uploads.knows(other.layout)
    await uploads.close()


async def test_what_is_done_to_its_end_says_how_it_ended() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def give() -> int:
        return 7

    assert await to_its_end(give()) == 7
    with pytest.raises(ZeroDivisionError):
        await to_its_end(fail())


async def test_a_head_whose_sender_went_away_is_wholly_taken(
    run: RelayRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(run, 2, Clock())
    await register(uploads, VERSION, VERSION.layout)
    limits = SimpleNamespace(max_documents=1)
    config = SimpleNamespace(publish_token_file=None, limits=limits)
    origin = Publishing(cast(Any, SimpleNamespace(config=config, feed=None)))
    committing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def commit(*_args: Any) -> bool:
        loop.call_soon_threadsafe(committing.set)
        return go_on.wait(20)

    monkeypatch.setattr(publishing, "_commit", commit)
    monkeypatch.setattr(Uploads, "lacking", lambda *_args: asyncio.sleep(0, []))
    state = trust.fresh(RUN, [signer().public_key])
    accepted = trust.accept(state, make_head(VERSION), 2 * 10**12)
    task = asyncio.create_task(origin._take_accepted(run, uploads, accepted, None))
    async with asyncio.timeout(20):
        await committing.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not uploads.knows(VERSION.layout)  # announced


async def test_an_upload_that_was_announced_unnoticed_is_forgotten_and_an_open_one_stays(
    run: RelayRun,
) -> None:
    """Its sender went away when its head had been written; or another publisher was faster."""
    clock = Clock()
    uploads = Uploads(run, 8, clock)
    await register(uploads, VERSION, VERSION.layout)
    await register(uploads, LATER, LATER.layout)
    third = make_version(3)
    await register(uploads, third, third.layout)
    opened = OpenRef(version=2, step=20, layout=LATER.layout, parts=[], deltas=[])
    serve(run, VERSION, opened=opened)
    await uploads.expire(60)
    assert [uploads.knows(v.layout) for v in (VERSION, LATER, third)] == [False, True, True]
    clock.now += 61
    await uploads.expire(60)
    assert [uploads.knows(v.layout) for v in (VERSION, LATER, third)] == [False, True, False]
    assert run.store.staged() == [2, 1]  # what nobody continued and no head names is removed
    await uploads.close()


async def test_a_manifest_before_its_layout_is_not_taken_for_a_late_delta(run: RelayRun) -> None:
    uploads = Uploads(run, 2, Clock())
    await register(uploads, LATER, LATER.ref.manifest)
    serve(run, VERSION)
    await uploads.expire(60)
    assert uploads.knows(LATER.ref.manifest)
    await uploads.close()


async def test_collections_are_kept_out_as_long_as_something_is_named_by_nothing(
    run: RelayRun,
) -> None:
    clock = Clock()
    uploads = Uploads(run, 2, clock)
    collector = unnamed_lock(run.store, exclusive=True)

    def collects() -> bool:
        try:
            collector.acquire()
        except BusyError:
            return False
        collector.release()
        return True

    async with uploads.sparing.during(), uploads.sparing.during():
        assert not collects()
        await register(uploads, VERSION, VERSION.ref.manifest)
    assert not collects()  # its layout is not here
    async with uploads.sparing.during():
        await register(uploads, VERSION, VERSION.layout)
    assert collects()
    async with uploads.sparing.during():
        await register(uploads, LATER, LATER.ref.manifest)
    assert not collects()
    clock.now += UNNAMED_S - 1
    await uploads.expire(2 * UNNAMED_S)
    assert not collects()
    clock.now += 1
    await uploads.expire(2 * UNNAMED_S)
    assert collects()  # nobody goes on with it
    async with uploads.sparing.during():
        await register(uploads, LATER, *LATER.parts)
    assert not collects()
    await uploads.close()
    assert collects()
