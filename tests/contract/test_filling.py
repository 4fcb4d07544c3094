"""Fills: cut-through, the held-back tail, single flight, wrong and missing bytes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay import routes
from relay.config import Prefetch
from relay.targets import ShardTarget
from shardcast.protocol.digest import digest_of
from shardcast.protocol.limits import HELD_BACK_BYTES
from tests.contract.made import SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import QUICK, config, path_of, running, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent, etag, refuses, sends, start_of
from tests.contract.wire_client import Wire, eventually, http

VERSION = make_version(1)
BIG = VERSION.shards[0]  # 256 KiB
DATA = VERSION.blobs[BIG]


@asynccontextmanager
async def tree(
    tmp_path: Path, version: MadeVersion = VERSION, **options: Any
) -> AsyncIterator[tuple[ScriptedParent, str]]:
    """A scripted parent and an on-demand relay behind it that knows the version."""
    options.setdefault("prefetch", Prefetch.DEMAND)
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    async with parent.running(), running(config(tmp_path / "r", parent.url, **options)) as url:
        await wait_head(url)
        for digest in (version.ref.manifest, version.layout, *version.parts):
            assert (await http(url, path_of(digest))).status == 200
        yield parent, url


async def test_fills_on_demand_and_then_serves_from_disk(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        for source in ("fill", "disk"):
            answer = await http(url, path_of(BIG))
            assert answer.body == DATA
            assert answer["Shardcast-Source"] == source
            assert answer["Shardcast-Depth"] == "1"
        assert parent.count(BIG) == 1


async def test_head_request_is_answered_without_a_fill(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        answer = await http(url, path_of(BIG), "HEAD")
        assert (answer.status, answer["Content-Length"]) == (200, str(SHARD))
        assert parent.count(BIG) == 0


async def test_bytes_pass_while_the_parent_pauses_and_the_tail_waits(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=SHARD - 1)
        parent.script(BIG, pause)
        async with Wire(url) as wire:
            await wire.ask(path_of(BIG))
            status, headers = await wire.head()
            assert (status, headers["shardcast-source"]) == (200, ["fill"])
            released = SHARD - HELD_BACK_BYTES
            assert await wire.exactly(released) == DATA[:released]
            with pytest.raises(TimeoutError):  # all but one byte is here: the tail is held
                await asyncio.wait_for(wire.reader.read(1), 0.2)
            pause.go.set()
            assert await wire.exactly(HELD_BACK_BYTES) == DATA[released:]


async def test_cut_through_over_three_tiers(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, first):
        second_config = config(tmp_path / "2", first, prefetch=Prefetch.DEMAND)
        async with running(second_config) as second:
            third_config = config(tmp_path / "3", second, prefetch=Prefetch.DEMAND)
            async with running(third_config) as third:
                await wait_head(third)
                for digest in VERSION.documents:
                    await http(third, path_of(digest))
                for digest in reversed(VERSION.documents):
                    assert (await http(third, path_of(digest))).status == 200
                pause = Pause(after=100_000)
                parent.script(BIG, pause)
                async with Wire(third) as wire:
                    await wire.ask(path_of(BIG))
                    await wire.head()
                    assert await wire.exactly(100_000) == DATA[:100_000]
                    pause.go.set()
                    assert await wire.exactly(SHARD - 100_000) == DATA[100_000:]
                depths = [(await http(u, "/healthz"))["Shardcast-Depth"] for u in (second, third)]
                assert depths == ["2", "3"]


async def test_a_wrong_blob_is_never_passed_on_whole(tmp_path: Path) -> None:
    wrong = DATA[:-1] + bytes([DATA[-1] ^ 1])
    async with tree(tmp_path) as (parent, url):
        parent.script(BIG, *[sends(wrong)] * 20)
        answer = await http(url, path_of(BIG))
        assert answer.status == 503 or not answer.whole
        assert len(answer.body) <= SHARD - HELD_BACK_BYTES
        parent.scripts.clear()


async def test_a_small_wrong_blob_leaks_nothing(tmp_path: Path) -> None:
    version = make_version(1, {"a": noise(1000)})
    async with tree(tmp_path, version) as (parent, url):
        parent.script(version.shards[0], *[sends(noise(1000, 5))] * 20)
        answer = await http(url, path_of(version.shards[0]))
        assert answer.status == 503
        assert int(answer["Retry-After"]) >= 1
        assert answer["Cache-Control"] == "no-store"


async def test_a_source_of_a_wrong_blob_is_left_alone(tmp_path: Path) -> None:
    good = ScriptedParent()
    bad = ScriptedParent()
    for parent in (good, bad):
        parent.serve(make_head(VERSION, sequence=10**12), VERSION)
    for digest in VERSION.shards:
        bad.script(digest, *[sends(noise(len(VERSION.blobs[digest]), 7))] * 20)
    async with (
        good.running(),
        bad.running(),
        running(config(tmp_path / "r", bad.url, good.url)) as url,
    ):
        await wait_ready(url)
        for digest in VERSION.shards:
            assert (await http(url, path_of(digest))).body == VERSION.blobs[digest]
    assert bad.count(VERSION.shards) <= 4  # what was in flight when the first was found out


async def test_of_two_parents_the_one_that_sends_wrong_bytes_is_banned_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = make_version(1, {"model": noise(40 * SHARD)})
    good, bad = ScriptedParent(), ScriptedParent()
    envelope = make_head(version)
    for parent in (good, bad):
        parent.serve(envelope, version)
    for digest in version.shards:
        bad.blobs[digest] = bytes(len(version.blobs[digest]))
    async with good.running(), bad.running():
        async with running(config(tmp_path / "r", good.url, bad.url)) as url:
            await wait_ready(url)
            for digest in version.shards:
                assert digest_of((await http(url, path_of(digest))).body) == digest
            parents = json.loads((await http(url, "/v1/status")).body)["parents"]
        assert bad.count(version.shards) <= 8  # what was in flight when the first one was seen
        assert {p["url"] for p in parents if p["banned"]} == {bad.url}
        assert any(bad.url in r.message and "wrong blob" in r.message for r in caplog.records)


async def test_one_flipped_bit_of_the_only_parent_costs_one_shard(tmp_path: Path) -> None:
    version = make_version(1, {"model": noise(40 * SHARD)})
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    bad = version.shards[5]
    parent.script(bad, sends(b"x" + version.blobs[bad][1:]))
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        async with asyncio.timeout(10):
            await wait_ready(url)
        assert parent.count(version.shards) == len(version.shards) + 1


async def test_two_hundred_readers_cost_one_upstream_request(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=50_000)
        parent.script(BIG, pause)
        readers = [asyncio.create_task(http(url, path_of(BIG))) for _ in range(200)]
        await asyncio.wait_for(pause.reached.wait(), 10)
        pause.go.set()
        answers = await asyncio.gather(*readers)
        assert all(answer.body == DATA for answer in answers)
        assert parent.count(BIG) == 1


async def test_a_fill_survives_its_first_reader(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=100_000)
        parent.script(BIG, pause)
        async with Wire(url) as wire:
            await wire.ask(path_of(BIG))
            await wire.exactly(10_000)
        pause.go.set()

        async def there() -> bool:
            return (await http(url, path_of(BIG)))["Shardcast-Source"] == "disk"

        await eventually(there)
        assert parent.count(BIG) == 1


async def test_a_dead_parent_in_the_middle_is_continued_elsewhere(tmp_path: Path) -> None:
    dying, other = ScriptedParent(), ScriptedParent()
    for parent in (dying, other):
        parent.serve(make_head(VERSION, sequence=10**12), VERSION)
    pauses = [Pause(after=100_000, abort=True), Pause(after=100_000, abort=True)]
    dying.script(BIG, pauses[0])
    other.script(BIG, pauses[1])
    async with dying.running(), other.running():
        settings = config(tmp_path / "r", dying.url, other.url, prefetch=Prefetch.DEMAND)
        async with running(settings) as url, Wire(url) as wire:
            await wait_head(url)
            for digest in (VERSION.ref.manifest, VERSION.layout, *VERSION.parts):
                await http(url, path_of(digest))
            await wire.ask(path_of(BIG))
            await wire.head()
            assert await wire.exactly(50_000) == DATA[:50_000]
            # Whichever parent was asked dies now; the other one begins to serve as usual.
            first = 0 if pauses[0].reached.is_set() else 1
            (other, dying)[first].scripts.clear()
            pauses[first].go.set()
            assert await wire.exactly(SHARD - 50_000) == DATA[50_000:]
        resumed = [ask for ask in (*dying.asks, *other.asks) if ask.start and ask.digest == BIG]
        assert [ask.start for ask in resumed] == [100_000]
        assert resumed[0].headers["if-range"] == etag(BIG)
        for pause in pauses:
            pause.go.set()


async def test_readers_are_cut_off_when_bytes_are_fetched_anew(tmp_path: Path) -> None:
    """A parent that ignores Range sends from the start: what readers have may be other bytes."""

    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=100_000, abort=True)
        parent.script(BIG, pause, sends(DATA))
        async with Wire(url) as wire:
            await wire.ask(path_of(BIG))
            await wire.head()
            await wire.exactly(100_000)
            pause.go.set()
            rest = await wire.rest()
            assert 100_000 + len(rest) < SHARD
        assert (await http(url, path_of(BIG))).body == DATA


async def test_a_parent_that_dies_for_good_aborts_the_readers(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=100_000, abort=True)
        parent.script(BIG, pause, *[refuses(500)] * 50)
        async with Wire(url) as wire:
            await wire.ask(path_of(BIG))
            await wire.head()
            await wire.exactly(100_000)
            pause.go.set()
            assert await wire.rest() == b""


async def test_a_range_waits_for_verification(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        pause = Pause(after=SHARD - 10)
        parent.script(BIG, pause)
        async with Wire(url) as wire:
            await wire.ask(path_of(BIG), headers={"Range": "bytes=10-19"})
            await asyncio.wait_for(pause.reached.wait(), 10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wire.reader.read(1), 0.2)
            pause.go.set()
            answer = await wire.answer()
            assert (answer.status, answer.body) == (206, DATA[10:20])
        assert parent.count(BIG) == 1


async def test_a_parent_that_has_not_got_it_yet_is_asked_again(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        parent.script(BIG, refuses(404), refuses(503, "0"), refuses(404))
        assert (await http(url, path_of(BIG))).body == DATA


async def test_news_ends_the_pause_of_a_blob_that_the_parent_did_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that hears of a version a moment later is asked again then, and not after its pause."""
    monkeypatch.setattr(routes, "PAUSE_CAP_S", 1e6)
    known = {digest: VERSION.blobs[digest] for digest in VERSION.shards[:2]}
    net = replace(QUICK, backoff_first_s=1e5, backoff_cap_s=1e5)
    async with tree(tmp_path, net=net) as (parent, url):
        for digest in known:
            del parent.blobs[digest]
        asking = [asyncio.create_task(http(url, path_of(digest))) for digest in known]
        await eventually(lambda: parent.count(known) == 2)
        parent.blobs.update(known)
        parent.serve(make_head(VERSION))
        answers = await asyncio.gather(*asking)
        assert [answer.status for answer in answers] == [200, 200]
        assert parent.count(known) == 4


async def test_no_parent_has_it_gives_503_with_retry_after(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        parent.script(BIG, *[refuses(404)] * 50)
        answer = await http(url, path_of(BIG))
        assert answer.status == 503
        assert answer["Retry-After"] == "1"
        parent.scripts.clear()
        assert (await http(url, path_of(BIG))).body == DATA  # nothing negative was kept


async def test_nothing_of_a_longer_wrong_document_stays_behind_the_right_one(
    tmp_path: Path,
) -> None:
    """The file was as long as the longest answer: unverified bytes under a verified name."""

    async def page(ask: object, writer: asyncio.StreamWriter) -> None:
        writer.write(start_of(200, 9000) + b"<html>" + b"x" * 5000)
        await writer.drain()
        writer.transport.abort()

    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    for digest in VERSION.documents:
        parent.script(digest, page)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        for digest in VERSION.documents:
            assert parent.count(digest) > 1
            assert (await http(url, path_of(digest))).body == VERSION.blobs[digest]


async def test_a_document_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    async def endless(ask: object, writer: asyncio.StreamWriter) -> None:
        writer.write(start_of(200, 1 << 40))
        await writer.drain()

    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    parent.script(VERSION.ref.manifest, *[endless] * 20)
    async with (
        parent.running(),
        running(config(tmp_path / "r", parent.url, prefetch=Prefetch.DEMAND)) as url,
    ):
        await wait_head(url)
        assert (await http(url, path_of(VERSION.ref.manifest))).status == 503


async def test_an_unknown_digest_costs_one_refresh_and_no_fill(tmp_path: Path) -> None:
    async with tree(tmp_path) as (parent, url):
        digest = digest_of(b"unknown")
        parent.blobs[digest] = b"unknown"
        for _ in range(5):
            assert (await http(url, path_of(digest))).status == 404
        assert parent.count(digest) == 0


async def test_a_shard_can_be_asked_for_before_its_documents(tmp_path: Path) -> None:
    """A child that got the documents elsewhere: the relay looks for what it has not got."""
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    parent.script(VERSION.ref.manifest, *[refuses(404)] * 3)
    async with (
        parent.running(),
        running(config(tmp_path / "r", parent.url, prefetch=Prefetch.DEMAND)) as url,
    ):
        await wait_head(url)
        assert (await http(url, path_of(BIG))).body == DATA


async def test_delta_blobs_are_ordinary_blobs(tmp_path: Path) -> None:
    deltas = [noise(300_000, 1), noise(1000, 2)]
    version = make_version(1, deltas=deltas)
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    async with (
        parent.running(),
        running(config(tmp_path / "r", parent.url, prefetch=Prefetch.DELTAS)) as url,
    ):
        await wait_head(url)
        await eventually(lambda: parent.count([digest_of(d) for d in deltas]) == 2)
        assert parent.count(version.shards) == 0
        for data in deltas:
            answer = await http(url, path_of(digest_of(data)))
            assert answer.body == data


async def test_a_full_disk_is_503_and_not_a_short_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay import runs
    from shardcast.errors import DiskFullError

    def full(*_: object) -> None:
        raise DiskFullError("version 1 needs 786509 bytes and 0 are free")

    async with tree(tmp_path) as (_parent, url):
        monkeypatch.setattr(runs.RelayRun, "stage", full)
        answer = await http(url, path_of(BIG))
        assert answer.status == 503
        assert b"no room" in answer.body
        monkeypatch.undo()
        assert (await http(url, path_of(BIG))).body == DATA


async def test_readers_hear_of_the_end_whatever_breaks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tree(tmp_path) as (_parent, url):
        with monkeypatch.context() as patch:

            def broken(self: ShardTarget) -> None:
                raise RuntimeError("a bug")

            patch.setattr(ShardTarget, "landed", broken)
            assert (await http(url, path_of(BIG))).body == DATA
        assert (await http(url, path_of(VERSION.shards[1]))).status == 200
