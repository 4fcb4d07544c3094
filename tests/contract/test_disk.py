"""What lies on disk: cold, damaged, copied, evicted."""

import asyncio
import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from relay import respond
from relay.app import serve
from relay.config import Prefetch
from relay.shelf import Shelf
from shardcast.errors import UsageError
from shardcast.protocol.digest import digest_of
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish
from tests.contract.relays import config, limits, path_of, running, wait_head, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import eventually, http

VERSION = make_version(1)


async def test_cold_bytes_are_read_in_a_thread_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    original = respond.read_ahead

    def cold(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "not in the page cache")

    def noted(fd: int, offset: int, count: int) -> None:
        read.append((offset, count))
        original(fd, offset, count)

    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", VERSION.files)
    async with running(config(tmp_path / "s")) as url:
        await wait_head(url)
        await http(url, path_of(VERSION.shards[1]))  # now it is known to be good
        monkeypatch.setattr(os, "preadv", cold)
        monkeypatch.setattr(respond, "read_ahead", noted)
        answer = await http(url, path_of(VERSION.shards[1]))
        monkeypatch.undo()
    assert answer.body == VERSION.blobs[VERSION.shards[1]]
    assert read == [(SHARD, SHARD)]


def test_a_file_that_cannot_be_probed_is_left_to_sendfile(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    fd = os.open(path, os.O_WRONLY)
    try:
        assert respond.in_page_cache(fd, 0, 10_000)  # EBADF: sendfile will say so
        respond.read_ahead(fd, 0, 10_000)
    finally:
        os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    try:
        respond.read_ahead(fd, 0, 10_000)
        assert respond.in_page_cache(fd, 0, 10_000)
    finally:
        os.close(fd)


async def test_a_damaged_delta_blob_is_fetched_again(tmp_path: Path) -> None:
    delta = noise(100_000, 3)
    version = make_version(1, deltas=[delta])
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    file = tmp_path / "r" / RUN / "blobs" / f"{digest_of(delta)}.bin"
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
        file.write_bytes(delta[:50_000] + bytes(50_000))  # a power cut
        async with running(settings) as url:
            assert (await http(url, path_of(digest_of(delta)))).body == delta
            assert file.read_bytes() == delta
            file.write_bytes(b"damaged while it is served")
            assert (await http(url, path_of(digest_of(delta)))).body == delta


async def test_a_damaged_document_is_fetched_again(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
        (tmp_path / "r" / RUN / "blobs" / f"{VERSION.parts[0]}.bin").write_bytes(b"{}")
        async with running(settings) as url:
            await wait_ready(url)
            for digest in VERSION.documents + VERSION.shards:
                answer = await http(url, path_of(digest))
                assert digest_of(answer.body) == digest


def test_the_shelf_keeps_nothing_bad(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.run(RUN, create=True)
    shelf = Shelf(run)
    data = b"some bytes"
    run.write_blob(digest_of(data), data)
    digest = digest_of(data)
    assert shelf.open_now(digest) is None  # that would take reading it
    assert shelf.holds(digest)
    assert shelf.verified == {digest}
    opened = shelf.open_now(digest)
    assert opened is not None
    os.close(opened[0])
    run.blob_path(digest).write_bytes(b"other")
    assert shelf.open_now(digest) is None
    assert run.has_blob(digest)
    assert not shelf.holds(digest)
    assert not run.has_blob(digest)
    assert shelf.open("0" * 64) is None
    store.close()


@pytest.mark.parametrize("look", ["open", "open_now", "look_again", "prune"])
def test_the_shelf_remembers_nothing_that_is_gone(tmp_path: Path, look: str) -> None:
    """Blobs are removed by who knows nothing of it: a relay that runs for a year forgets them."""
    store = Store(tmp_path)
    run = store.run(RUN, create=True)
    shelf = Shelf(run)
    gone, here = (digest_of(data) for data in (b"gone", b"here"))
    for data in (b"gone", b"here"):
        run.write_blob(digest_of(data), data)
        assert shelf.holds(digest_of(data))
    run.remove_blob(gone)
    if look == "prune":
        shelf.prune()
    else:
        assert not getattr(shelf, look)(gone)
    assert shelf.verified == {here}
    store.close()


async def test_a_bad_source_of_a_copy_is_noticed_and_fetched(tmp_path: Path) -> None:
    data = noise(3 * SHARD, 6)
    first = make_version(1, {"a": data})
    second = make_version(2, {"a": data[: 2 * SHARD] + noise(SHARD, 7), "b": data})
    parent = ScriptedParent()
    parent.serve(make_head(first), first)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
            committed = tmp_path / "r" / RUN / "versions" / "000001" / "a"
            await eventually(committed.exists)
        with committed.open("r+b") as file:
            file.seek(SHARD + 3)
            file.write(b"\0\0\0\0")
        parent.serve(make_head(first, second), second)
        async with running(settings) as url:
            await wait_ready(url)
            target = tmp_path / "r" / RUN / "versions" / "000002"
            await eventually(target.is_dir)
            assert {p.name: p.read_bytes() for p in target.iterdir()} == dict(second.files)


async def test_an_address_that_is_taken_is_a_usage_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="in use"):
            await serve(config(tmp_path / "s", listen=listen), ready=print, stop=asyncio.Event())
    with pytest.raises(UsageError, match="not known"):
        await serve(
            config(tmp_path / "s", listen="no-such-host.invalid:1"),
            ready=print,
            stop=asyncio.Event(),
        )


async def test_a_version_that_is_evicted_is_404_at_an_origin_and_the_head_is_current(
    tmp_path: Path,
) -> None:
    source = tmp_path / "c"
    for number in range(1, 7):  # a publisher's head keeps four
        files = {"a": noise(SHARD, number)}
        await asyncio.to_thread(publish, tmp_path / "s", source, files)
    old = make_version(1, {"a": noise(SHARD, 1)})
    new = make_version(6, {"a": noise(SHARD, 6)})
    async with running(config(tmp_path / "s")) as url:
        await wait_head(url)
        assert (await http(url, path_of(old.shards[0]))).status == 404
        assert (await http(url, path_of(new.shards[0]))).status == 200


async def test_an_origin_that_lost_its_journal_serves_what_is_good(tmp_path: Path) -> None:
    files = {"a": noise(2 * SHARD, 1)}
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", files)
    (journal,) = (tmp_path / "s").rglob("*.shards")
    journal.unlink()
    version = make_version(1, files)
    async with running(config(tmp_path / "s")) as url:
        await wait_ready(url)
        for digest in version.shards:
            assert (await http(url, path_of(digest))).body == version.blobs[digest]


async def test_prefetch_deltas_then_demand(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    for policy in (Prefetch.DELTAS, Prefetch.DEMAND):
        before = parent.count(VERSION.shards)
        settings = config(tmp_path / policy, "http://127.0.0.1:1", prefetch=policy)
        async with parent.running():
            settings = config(tmp_path / policy, parent.url, prefetch=policy)
            async with running(settings) as url:
                await wait_ready(url)  # ready at once: the rest comes on demand
                await wait_head(url)
                await eventually(lambda: parent.count(VERSION.parts))
                assert parent.count(VERSION.shards) == before
                assert (await http(url, path_of(VERSION.shards[0]))).status == 200
                before += 1


async def test_a_quota_evicts_the_oldest(tmp_path: Path) -> None:
    size = 3 * SHARD
    versions = [make_version(n, {"a": noise(size, n)}) for n in (1, 2, 3)]
    parent = ScriptedParent()
    parent.serve(make_head(versions[0]), versions[0])
    async with parent.running():
        options: dict[str, Any] = {"quota_bytes": 2 * size + 1000, "limits": limits(recent_s=0)}
        async with running(config(tmp_path / "r", parent.url, **options)) as url:
            for count in (1, 2, 3):
                parent.serve(make_head(*versions[:count]), *versions[:count])
                directory = tmp_path / "r" / RUN / "versions"
                await eventually((directory / f"{count:06d}").is_dir)
            await eventually(
                lambda: sorted(p.name for p in directory.iterdir()) == ["000002", "000003"]
            )
            assert (await http(url, path_of(versions[2].shards[0]))).status == 200


async def test_a_head_that_is_not_served_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", VERSION.files)
    days_ahead = time.time_ns() // 1_000_000 + 3 * 86_400_000
    head = make_head(VERSION, sequence=days_ahead)  # refused anew at each look, by the clock
    Store(tmp_path / "s").run(RUN).write_head(head)
    looks = 0

    async def looked_at_often() -> bool:
        nonlocal looks
        looks += (await http(url, f"/v1/{RUN}/head")).status == 404
        return looks > 10

    async with running(config(tmp_path / "s")) as url:
        await eventually(looked_at_often)
    told = [record for record in caplog.records if "not served" in record.getMessage()]
    assert len(told) == 1
