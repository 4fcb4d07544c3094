"""A relay whose disk is full: it makes room, or says 503, and never spins or drops what is read."""

import asyncio
import logging
import re
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from relay import responses, retaining
from relay.config import Prefetch
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import config, limits, metric, path_of, running, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import Wire, eventually, http
from tests.faults.machine import fill_up, read_only, small_tmpfs
from tests.faults.refusals import refusing

MIB = 1 << 20
SIZE = 4 * SHARD
HURRIED = limits(recent_s=0)


def version(number: int, *, run: str = RUN, size: int = SIZE) -> MadeVersion:
    return make_version(number, {"a": noise(size, number + 100 * (run != RUN))}, run=run)


def on_disk(store: Path, run: str = RUN) -> list[int]:
    directory = store / run / "versions"
    return sorted(int(p.name) for p in directory.iterdir()) if directory.is_dir() else []


async def problem(url: str) -> str:
    answer = await http(url, "/v1/status")
    found = re.search(r'"problem":("(?:[^"\\]|\\.)*"|null)', answer.body.decode())
    assert found is not None
    return found[1]


@pytest.mark.fault(15)
@pytest.mark.fault(16)
async def test_a_full_relay_gives_up_the_oldest_for_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --keep and --quota, and with a head that retains everything."""
    parent = ScriptedParent()
    versions = [version(number) for number in range(1, 6)]
    with small_tmpfs(tmp_path / "disk", 5 * MIB // 2) as disk:
        parent.serve(make_head(versions[0]), versions[0])
        async with parent.running(), running(config(disk / "s", parent.url, limits=HURRIED)) as url:
            for count in range(1, 6):
                parent.serve(make_head(*versions[:count]), *versions[:count])
                await eventually(lambda n=count: n in on_disk(disk / "s"), what=f"v{count}")
                await wait_ready(url)
            assert on_disk(disk / "s") == [4, 5]
            assert await metric(url, "shardcast_evicted_versions_total") == 3
            for newest in versions[3:]:
                for shard in newest.shards:
                    assert (await http(url, path_of(shard))).body == newest.blobs[shard]
            # Each byte came once: nothing was fetched only to find no room for it.
            for one in versions:
                assert all(parent.count(shard) == 1 for shard in one.shards)
    said = [r.getMessage() for r in caplog.records if "evicted: no room for" in r.getMessage()]
    assert len(said) == 3
    assert "version 1 " in said[0]


@pytest.mark.fault(15)
async def test_what_no_head_retains_goes_before_an_older_version_that_one_does(
    tmp_path: Path,
) -> None:
    parent = ScriptedParent()
    first, dropped, third = version(1), version(2), version(3)
    with small_tmpfs(tmp_path / "disk", 7 * MIB // 2) as disk:
        async with parent.running(), running(config(disk / "s", parent.url, limits=HURRIED)) as url:
            for count in (1, 2):
                parent.serve(make_head(*[first, dropped][:count]), first, dropped)
                await eventually(lambda n=count: n in on_disk(disk / "s"))
                await wait_ready(url)
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(MIB))
            parent.serve(make_head(first, third), third)
            await eventually(lambda: on_disk(disk / "s") == [1, 3])
            await wait_ready(url)


@pytest.mark.fault(15)
async def test_a_full_disk_without_anything_to_give_up_is_503_and_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = ScriptedParent()
    first, second = version(1), version(2)
    with small_tmpfs(tmp_path / "disk", 4 * MIB) as disk:
        parent.serve(make_head(first), first)
        async with parent.running(), running(config(disk / "s", parent.url, limits=HURRIED)) as url:
            await wait_ready(url)
            await eventually(lambda: on_disk(disk / "s") == [1])
            # A head still fits; a version does not.
            ballast = fill_up(disk)
            with ballast.open("r+b") as file:
                file.truncate(ballast.stat().st_size - 128 * 1024)
            parent.serve(make_head(first, second), second)

            async def told() -> bool:
                return "free" in await problem(url)

            await eventually(told, what="status says what is wrong")
            answers = [await http(url, path_of(second.shards[0])) for _ in range(5)]
            assert [a.status for a in answers] == [503] * 5
            assert all(a["retry-after"] == "5" for a in answers)
            assert b"no room" in answers[0].body
            assert (await http(url, "/readyz")).status == 503
            # Nothing was asked of the parent only to be thrown away, and nobody spins.
            assert parent.count(second.shards) == 0
            tries = [r for r in caplog.records if "prefetching" in r.getMessage()]
            assert len(tries) < 12
            # What is there is served as ever.
            for shard in first.shards:
                assert (await http(url, path_of(shard))).body == first.blobs[shard]
            assert on_disk(disk / "s") == [1]
            ballast.unlink()
            await wait_ready(url)

            async def settled() -> bool:
                return await problem(url) == "null"

            await eventually(settled, what="status says that nothing is wrong any more")
            for shard in second.shards:
                assert (await http(url, path_of(shard))).body == second.blobs[shard]
                assert parent.count(shard) == 1


@pytest.mark.fault(15)
async def test_a_disk_without_room_for_even_a_head_heals(tmp_path: Path) -> None:
    parent = ScriptedParent()
    first, second = version(1), version(2)
    with small_tmpfs(tmp_path / "disk", 4 * MIB) as disk:
        parent.serve(make_head(first), first)
        async with parent.running(), running(config(disk / "s", parent.url)) as url:
            await wait_ready(url)
            await eventually(lambda: on_disk(disk / "s") == [1])
            ballast = fill_up(disk)
            old = (await http(url, f"/v1/{RUN}/head")).body
            parent.serve(make_head(first, second), second)

            async def told() -> bool:
                return "No space left" in await problem(url)

            await eventually(told, what="status says what is wrong")
            # A head that is not remembered is not passed on; the old one is, whole.
            assert (await http(url, f"/v1/{RUN}/head")).body == old
            assert (disk / "s" / RUN / "head.json").read_bytes() == old
            for shard in first.shards:
                assert (await http(url, path_of(shard))).body == first.blobs[shard]
            ballast.unlink()
            await eventually(lambda: on_disk(disk / "s") == [1, 2])
            await wait_ready(url)


@pytest.mark.fault(16)
async def test_a_version_that_is_read_stays_until_its_reader_is_done(tmp_path: Path) -> None:
    parent = ScriptedParent()
    # Larger than what sockets buffer, so that the reader is in the middle of it.
    size = 16 * MIB
    first, second, third = (version(n, size=size) for n in (1, 2, 3))
    with small_tmpfs(tmp_path / "disk", 34 * MIB) as disk:
        parent.serve(make_head(first), first)
        async with parent.running():
            settings = config(disk / "s", parent.url, limits=HURRIED)
            async with running(settings) as url:
                for count in (1, 2):
                    parent.serve(make_head(*[first, second][:count]), first, second)
                    await wait_ready(url)
                    await eventually(lambda n=count: n in on_disk(disk / "s"))
                shards = first.shards
                async with Wire(url) as slow:
                    for shard in shards:  # pipelined: the connection reads on and on
                        await slow.ask(path_of(shard))
                    _status, headers = await slow.head()
                    body = await slow.exactly(1)
                    parent.serve(make_head(first, second, third), third)

                    async def told() -> bool:
                        return "free" in await problem(url)

                    await eventually(told, what="no room while version 1 is read")
                    assert 1 in on_disk(disk / "s")
                    assert 2 in on_disk(disk / "s")
                    body += await slow.exactly(int(headers["content-length"][0]) - 1)
                    assert body == first.blobs[shards[0]]
                    for shard in shards[1:]:
                        answer = await slow.answer()
                        if answer.status != 200:
                            break  # given up between two requests: a clear 404 or 503
                        assert answer.whole
                        assert answer.body == first.blobs[shard]
                await wait_ready(url)
                await eventually(lambda: on_disk(disk / "s") == [2, 3])


@pytest.mark.fault(16)
async def test_a_reader_slower_than_any_worker_does_not_keep_the_newest_version_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full, one stranger would else stop a relay for as long as he likes."""
    monkeypatch.setattr(responses, "GRACE_S", 0.0)
    monkeypatch.setattr(responses, "SLOWEST_BYTES_PER_S", 1 << 50)  # everyone is slower
    parent = ScriptedParent()
    first, second, third = (version(n, size=16 * MIB) for n in (1, 2, 3))
    with small_tmpfs(tmp_path / "disk", 34 * MIB) as disk:
        parent.serve(make_head(first), first)
        async with parent.running():
            settings = config(disk / "s", parent.url, limits=HURRIED)
            async with running(settings) as url, Wire(url) as slow:
                for count in (1, 2):
                    parent.serve(make_head(*[first, second][:count]), first, second)
                    await wait_ready(url)
                    await eventually(lambda n=count: n in on_disk(disk / "s"))
                for shard in first.shards:
                    await slow.ask(path_of(shard))
                assert (await slow.head())[0] == 200
                parent.serve(make_head(first, second, third), third)
                await eventually(lambda: on_disk(disk / "s") == [2, 3])
                await wait_ready(url)
                assert len(await slow.rest()) < 16 * MIB


@pytest.mark.fault(16)
async def test_slow_readers_hold_two_versions_beyond_the_bounds_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection a version, that takes nothing: so any stranger could fill the disk."""
    monkeypatch.setattr(retaining, "EVERY_S", 0.05)
    parent, store = ScriptedParent(), tmp_path / "s"
    versions = [version(number, size=8 * MIB) for number in range(1, 7)]
    wires: list[Wire] = []
    async with (
        parent.running(),
        AsyncExitStack() as readers,
        running(config(store, parent.url, keep=1, limits=HURRIED)) as url,
    ):
        for one in versions:
            parent.serve(make_head(one), one)
            await eventually(lambda n=one.ref.version: n in on_disk(store))
            await wait_ready(url)
            wires.append(await readers.enter_async_context(Wire(url)))
            for shard in one.shards:  # more of them than sockets buffer
                await wires[-1].ask(path_of(shard))
            assert (await wires[-1].head())[0] == 200
        await eventually(lambda: on_disk(store) == [4, 5, 6], what="1 to 3 are gone")
        for wire, one in list(zip(wires, versions, strict=True))[3:]:
            assert await wire.exactly(SHARD) == one.blobs[one.shards[0]]
            answer = await wire.answer()
            assert (answer.status, answer.body) == (200, one.blobs[one.shards[1]])
        for wire in wires[:3]:
            assert len(await wire.rest()) < 8 * MIB
        await readers.aclose()


@pytest.mark.fault(15)
async def test_a_store_that_is_read_only_serves_what_it_has_and_heals(tmp_path: Path) -> None:
    parent = ScriptedParent()
    first, second = version(1), version(2)
    with small_tmpfs(tmp_path / "disk", 8 * MIB) as disk:
        parent.serve(make_head(first), first)
        async with parent.running():
            settings = config(disk / "s", parent.url)
            async with running(settings) as url:
                await wait_ready(url)
                await eventually(lambda: on_disk(disk / "s") == [1])
            with read_only(disk):
                started = running(settings)
                url = await started.__aenter__()
                for shard in first.shards:
                    assert (await http(url, path_of(shard))).body == first.blobs[shard]
                parent.serve(make_head(first, second), second)

                async def told() -> bool:
                    return "Read-only file system" in await problem(url)

                await eventually(told, what="status says what is wrong")
                assert (await http(url, path_of(second.shards[0]))).status == 404
            await wait_ready(url)
            await eventually(lambda: on_disk(disk / "s") == [1, 2])
            for shard in second.shards:
                assert (await http(url, path_of(shard))).body == second.blobs[shard]
            await started.__aexit__(None, None, None)


@pytest.mark.fault(15)
@pytest.mark.parametrize("number", [5, 28, 30, 122], ids=["EIO", "ENOSPC", "EROFS", "EDQUOT"])
async def test_a_disk_that_refuses_in_the_middle_never_makes_a_short_blob(
    tmp_path: Path, number: int
) -> None:
    """From some file operation on, everything fails; then the disk works again."""
    parent = ScriptedParent()
    versions = [version(n) for n in range(1, 8)]
    parent.serve(make_head(versions[0]), versions[0])
    async with parent.running(), running(config(tmp_path / "s", parent.url)) as url:
        await wait_ready(url)
        await eventually(lambda: on_disk(tmp_path / "s") == [1])
        for count in range(2, 8):
            one = versions[count - 1]
            with refusing(number, 1 + (4 if number == 30 else 9) * (count - 2)) as refusals:
                parent.serve(make_head(*versions[:count]), *versions[:count])
                await eventually(lambda r=refusals: r.refused, what="something was refused")
                for shard in one.shards:
                    answer = await http(url, path_of(shard))
                    assert answer.status in (200, 404, 503)
                    if answer.status == 200 and answer.whole:
                        assert answer.body == one.blobs[shard]
                    if answer.status == 503:
                        assert "retry-after" in answer
            await eventually(lambda n=count: n in on_disk(tmp_path / "s"), what="healed")
            await wait_ready(url)
            directory = tmp_path / "s" / RUN / "versions" / f"{count:06d}"
            assert (directory / "a").read_bytes() == one.files["a"]


@pytest.mark.fault(15)
async def test_a_quota_is_one_for_all_runs_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    parent = ScriptedParent()
    old, new = version(1), version(2)
    other = version(1, run="other")
    parent.serve(make_head(old, new), old, new)
    parent.serve(make_head(other, run="other"), other, run="other")
    async with parent.running():
        settings = config(
            tmp_path / "s",
            parent.url,
            quota_bytes=2 * SIZE + 1000,
            prefetch=Prefetch.ALL,
            limits=limits(recent_s=3600),
        )
        async with running(settings) as url:
            await wait_ready(url)
            await eventually(lambda: on_disk(tmp_path / "s") == [2])
            await eventually(lambda: on_disk(tmp_path / "s", "other") == [1])
            answer = await http(url, path_of(old.shards[0]))
            assert answer.status == 503
            assert answer["retry-after"] == "5"
            assert b"quota" in answer.body
            assert parent.count(old.shards) == 0
            for shard in new.shards:
                assert (await http(url, path_of(shard))).body == new.blobs[shard]


@pytest.mark.fault(15)
async def test_a_quota_lets_the_oldest_of_any_run_go(tmp_path: Path) -> None:
    parent = ScriptedParent()
    versions = [version(n) for n in (1, 2, 3)]
    other = version(1, run="other")
    parent.serve(make_head(other, run="other"), other, run="other")
    parent.serve(make_head(versions[0]), versions[0])
    async with parent.running():
        settings = config(tmp_path / "s", parent.url, quota_bytes=3 * SIZE + 1000, limits=HURRIED)
        async with running(settings) as url:
            for count in (1, 2, 3):
                parent.serve(make_head(*versions[:count]), *versions[:count])
                await eventually(lambda n=count: n in on_disk(tmp_path / "s"))
                await wait_ready(url)
            await eventually(lambda: on_disk(tmp_path / "s") == [2, 3])
            assert on_disk(tmp_path / "s", "other") == [1]  # the newest of its run


@pytest.mark.fault(15)
async def test_room_is_looked_for_once_and_not_again_at_every_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    parent = ScriptedParent()
    old, new = version(1), version(2)
    with small_tmpfs(tmp_path / "disk", 2 * MIB) as disk:
        parent.serve(make_head(old, new), old, new)
        async with parent.running():
            settings = config(disk / "s", parent.url, limits=HURRIED)
            async with running(settings) as url:
                await wait_ready(url)
                (disk / "ballast").write_bytes(bytes(SIZE // 2))
                began = time.monotonic()
                answers = await asyncio.gather(
                    *(http(url, path_of(shard)) for shard in old.shards * 10)
                )
                took = time.monotonic() - began
                assert {answer.status for answer in answers} == {503}
                looks = [r for r in caplog.records if "every other version is" in r.getMessage()]
                assert len(looks) <= 1 + took / 2.0
                assert parent.count(old.shards) == 0
