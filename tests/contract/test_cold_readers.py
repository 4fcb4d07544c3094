"""Readers of what is cold on the disk: nothing stays of those that leave, and many hold up no head."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from relay import respond
from relay.node import READING_THREADS, Node
from relay.origin import OriginFeed
from relay.receiving import FileReceiver
from shardcast.protocol.digest import digest_of
from shardcast.store.directory import VersionDirectory
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish
from tests.contract.relays import config, path_of, running, status_of, wait_head, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.test_publishing import TOKEN, Origin, settings
from tests.contract.wire_client import PATIENCE_S, Wire, eventually
from tests.faults.trees import has_all

VERSION = make_version(1, {"model": noise(4 * SHARD)})


class Disk:
    """Stands in for a slow disk: shards are hashed when it is told to go on."""

    def __init__(self) -> None:
        self.hashing: list[int] = []
        self.hashed: list[int] = []
        self.go = threading.Event()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made, real = Disk(), VersionDirectory.xxh3

    def xxh3(self: VersionDirectory, name: str, offset: int, length: int) -> bytes | None:
        made.hashing.append(offset)
        assert made.go.wait(PATIENCE_S)
        try:
            return real(self, name, offset, length)
        finally:
            made.hashed.append(offset)

    monkeypatch.setattr(VersionDirectory, "xxh3", xxh3)
    return made


def opened(path: Path) -> list[str]:
    """The descriptors of this process that lead to a file in a directory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists them
        if target.startswith(f"{path}/"):
            found.append(target)
    return found


def evicted(store: Path) -> bool:
    """Whether another process can remove the version: nobody holds a lease of it."""
    ours = Store(store)
    try:
        return ours.run(RUN).evict(1)
    finally:
        ours.close()


async def only_connection(url: str) -> bool:
    """Whether a relay knows of nobody but who asks this."""
    return bool((await status_of(url))["connections"] == 1)


async def test_readers_that_leave_while_their_shards_are_hashed_leave_nothing(
    tmp_path: Path, disk: Disk
) -> None:
    """After a restart every shard is hashed before it is served the first time."""
    parent, store = ScriptedParent(), tmp_path / "r"
    parent.serve(make_head(VERSION), VERSION)
    version = store / RUN / "versions" / "000001"
    disk.go.set()
    async with parent.running():
        async with running(config(store, parent.url)) as url:
            await wait_ready(url)
        disk.go.clear()
        disk.hashing.clear()
        disk.hashed.clear()
        async with running(config(store, parent.url)) as url, AsyncExitStack() as readers:
            await wait_head(url)
            for digest in VERSION.shards:
                wire = await readers.enter_async_context(Wire(url))
                await wire.ask(path_of(digest))
            await eventually(lambda: len(disk.hashing) == len(VERSION.shards))
            await readers.aclose()  # a hedged request that lost
            await eventually(lambda: only_connection(url), what="the readers are gone")
            disk.go.set()
            await eventually(lambda: len(disk.hashed) == len(VERSION.shards))
            await eventually(lambda: not opened(version), what="descriptors")
            await eventually(lambda: evicted(store), what="leases")


@pytest.mark.parametrize("wait", ["hashed", "read"])
async def test_a_crowd_of_cold_readers_holds_up_no_new_version(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    """The disk stands still for whoever reads what is cold; what is new comes all the same."""
    parent, store, newer = ScriptedParent(), tmp_path / "r", make_version(2)
    parent.serve(make_head(VERSION), VERSION)
    reading: list[int] = []

    def read_ahead(fd: int, offset: int, count: int) -> None:
        reading.append(offset)
        assert disk.go.wait(PATIENCE_S)

    disk.go.set()
    async with parent.running():
        async with running(config(store, parent.url)) as url:
            await wait_ready(url)
        async with running(config(store, parent.url)) as url, AsyncExitStack() as readers:
            await wait_head(url)
            if wait == "read":
                assert await has_all(url, VERSION)  # hashed
                monkeypatch.setattr(respond, "in_page_cache", lambda *_: False)
                monkeypatch.setattr(respond, "read_ahead", read_ahead)
            disk.go.clear()
            disk.hashing.clear()
            for number in range(40):
                wire = await readers.enter_async_context(Wire(url))
                await wire.ask(path_of(VERSION.shards[number % len(VERSION.shards)]))
            crowd = reading if wait == "read" else disk.hashing

            async def all_came() -> bool:
                return bool(
                    (await status_of(url))["requests"] == 41 and len(crowd) >= READING_THREADS
                )

            await eventually(all_came)
            parent.serve(make_head(VERSION, newer), VERSION, newer)

            async def whole() -> bool:
                return bool((await status_of(url))["runs"][RUN]["complete"] == 2)

            await eventually(whole, what="the new version")
            assert not disk.go.is_set()
            disk.go.set()


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", VERSION.files)
    store = Store(tmp_path / "s")
    made = Node(config(tmp_path / "s"), store, "ab" * 16, asyncio.get_running_loop())
    await OriginFeed(made).prepare()
    yield made
    await made.close()
    made.fills.close()
    made.reading.shutdown()
    store.close()


async def test_who_is_told_to_stop_while_a_shard_is_hashed_leaves_nothing(
    node: Node, disk: Disk
) -> None:
    """Prefetching and scrubbing are cancelled whenever a newer version is announced."""
    run = node.runs[RUN]
    stored = run.stored[1]
    known = [found for digest in VERSION.shards if (found := run.find(digest)) is not None]
    assert len(known) == len(VERSION.shards)
    looks = [asyncio.create_task(node.ensure(run, blob)) for blob in known]
    await eventually(lambda: len(disk.hashing) == len(looks))
    for look in looks:
        look.cancel()
    await asyncio.gather(*looks, return_exceptions=True)
    assert stored.leased  # the threads go on
    disk.go.set()
    await eventually(lambda: not stored.leased)
    assert not opened(stored.directory)
    assert run.store.evict(1)


async def test_an_upload_that_leaves_while_its_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()
    make, close = FileReceiver.temporary, FileReceiver.close

    def slow(store: RunStore, digest: str) -> FileReceiver:
        begun.set()
        assert go.wait(PATIENCE_S)
        return make(store, digest)

    def noted(self: FileReceiver) -> None:
        close(self)
        closed.set()

    monkeypatch.setattr(FileReceiver, "temporary", slow)
    monkeypatch.setattr(FileReceiver, "close", noted)
    delta = noise(1000, 8)
    version = make_version(1, deltas=[delta])
    (part,) = version.ref.deltas[0].parts
    files = tmp_path / "store" / RUN / "state" / "tmp"
    async with running(settings(tmp_path)) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        await origin.documents(version)
        assert await origin.put(part, version.blobs[part]) == 201
        auth = {"Authorization": f"Bearer {TOKEN}", "Content-Length": str(len(delta))}
        async with Wire(url) as wire:
            await wire.ask(path_of(digest_of(delta)), "PUT", auth)
            await eventually(begun.is_set)
        await eventually(lambda: only_connection(url), what="the publisher is gone")
        go.set()
        await eventually(closed.is_set)
        assert not opened(files)
        assert not list(files.iterdir())
