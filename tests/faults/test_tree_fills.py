"""Fills under load and under change: one upstream read, no storms, nothing fetched for nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from relay.config import Prefetch
from shardcast.protocol.head import OpenRef
from tests.contract.made import RUN, SHARD, make_head, make_version, noise
from tests.contract.relays import config, limits, path_of, running, status_of, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent, refuses
from tests.contract.wire_client import Wire, eventually, http
from tests.faults.trees import get, has_all, statuses
from tests.faults.world import PATIENT

VERSION = make_version(1, {"model": noise(12 * SHARD)})
BLOB = VERSION.shards[0]
DATA = VERSION.blobs[BLOB]
READERS = 2000
ADDRESSES = 50


@pytest.mark.fault(14)
async def test_two_thousand_readers_of_a_cold_blob_cost_one_request(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    pause = Pause(after=50_000)
    async with (
        parent.running(),
        running(config(tmp_path / "r", parent.url, prefetch=Prefetch.DEMAND, net=PATIENT)) as url,
    ):
        await wait_head(url)
        for digest in VERSION.documents[::-1]:
            assert (await get(url, digest)).status == 200
        parent.script(BLOB, pause)
        wire = path_of(BLOB)
        outcomes: Counter[str] = Counter()

        async def read(number: int) -> None:
            async with Wire(url, source=f"127.0.1.{1 + number % ADDRESSES}") as reader:
                await reader.ask(wire)
                answer = await reader.answer()
                right = answer.body == DATA
                outcomes["right" if right else f"{answer.status} {len(answer.body)}"] += 1

        async with Wire(url) as first:  # it begins the fill, and leaves
            await first.ask(wire)
            await first.head()
            await first.exactly(10_000)
            readers = [asyncio.create_task(read(number)) for number in range(READERS)]
            await asyncio.wait_for(pause.reached.wait(), 10)
        pause.go.set()
        await asyncio.gather(*readers)
        assert outcomes == {"right": READERS}
        assert parent.count(BLOB) == 1
        # A second wave finds it on disk.
        await asyncio.gather(*(read(number) for number in range(100)))
        assert outcomes == {"right": READERS + 100}
        assert parent.count(BLOB) == 1


@pytest.mark.fault(10)
async def test_a_blob_that_is_not_there_yet_costs_few_questions_and_is_not_remembered(
    tmp_path: Path,
) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url, prefetch=Prefetch.DEMAND)
        async with running(settings) as url:
            await wait_head(url)
            for digest in VERSION.documents[::-1]:
                assert (await get(url, digest)).status == 200
            del parent.blobs[BLOB]
            found = await statuses(url, [BLOB] * 300)
            assert set(found) == {503}
            assert 2 <= parent.count(BLOB) <= 6
            parent.blobs[BLOB] = DATA
            assert (await get(url, BLOB)).body == DATA
            # And it comes by itself to those who wait, when it appears in between.
            late = VERSION.shards[1]
            parent.script(late, *[refuses(404)] * 3)
            assert set(await statuses(url, [late] * 300)) == {200}
            assert parent.count(late) == 4


# --- versions that are superseded ---------------------------------------------------------------


@pytest.mark.fault(22)
async def test_what_a_newer_version_does_not_need_is_dropped_unless_somebody_reads_it(
    tmp_path: Path,
) -> None:
    """N is on its way when N+1 and N+2 come: its blobs stop where they are, but for a reader's."""
    same = noise(2 * SHARD, 99)
    first = make_version(1, {"a": noise(6 * SHARD, 1), "same": same})
    second = make_version(2, {"a": noise(6 * SHARD, 2), "same": same})
    third = make_version(3, {"a": noise(6 * SHARD, 3), "same": same})
    parent = ScriptedParent()
    parent.serve(make_head(first), first)
    pauses = {digest: Pause(after=100_000) for digest in first.shards}
    done, read, *dropped = first.shards[:6]
    shared = first.shards[6:]
    for digest, pause in pauses.items():
        parent.script(digest, pause)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await eventually(lambda: parent.count(first.shards) == len(first.shards))
        pauses[done].go.set()
        await eventually(lambda: _present(url, 1, 1))
        async with Wire(url) as reader:
            await reader.ask(path_of(read))
            await reader.head()
            parent.serve(make_head(first, second), second)
            parent.serve(make_head(first, second, third), third)
            # Nobody lets the pauses go: only because they are dropped there are slots for N+2.
            await eventually(lambda: parent.count(third.shards[:6]) == 6)
            fills = {fill["digest"] for fill in (await status_of(url))["fills"]}
            assert not fills & set(dropped)
            assert {read, *shared} <= fills  # somebody reads it; the newest needs them too
            for digest in (read, *shared):
                pauses[digest].go.set()
            assert await reader.exactly(SHARD) == first.blobs[read]
        await wait_ready(url)
        await eventually(lambda: _present(url, 1, 4))  # what was verified of N stays
        assert parent.count(second.shards[:6]) <= 6
        assert parent.count([*shared]) == len(shared)
        for pause in pauses.values():
            pause.go.set()
        assert await has_all(url, first)  # on demand


async def _present(url: str, version: int, shards: int) -> bool:
    run = (await status_of(url))["runs"].get(RUN, {"versions": []})
    return any(v["version"] == version and v["present"] >= shards for v in run["versions"])


@pytest.mark.fault(22)
async def test_an_open_version_whose_parts_do_not_come_holds_nothing_up(tmp_path: Path) -> None:
    """The publisher died within version 2; version 3 of another one is complete."""
    first, third = make_version(1), make_version(3)
    dead = make_version(2, {"a": noise(3 * SHARD, 2)})
    opened = OpenRef(version=2, step=2, layout=dead.layout, parts=dead.parts, deltas=[])
    parent = ScriptedParent()
    parent.serve(make_head(first, opened=opened), first)
    parent.blobs[dead.layout] = dead.blobs[dead.layout]
    parent.blobs[dead.parts[0]] = dead.blobs[dead.parts[0]]
    never = Pause(after=1)
    parent.script(dead.parts[0], never)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await asyncio.wait_for(never.reached.wait(), 10)
        await wait_ready(url)  # the newest complete one came first
        assert await has_all(url, first)
        parent.serve(make_head(first, third), third)
        await eventually(lambda: has_all(url, third))
        await wait_ready(url)
        assert not never.go.is_set()
        never.go.set()


# --- one bad run --------------------------------------------------------------------------------


@pytest.mark.fault(18)
async def test_a_run_whose_blobs_do_not_come_takes_no_turns_from_another(tmp_path: Path) -> None:
    """Its blobs stand still after a byte, more of them than there are threads."""
    stuck = make_version(1, {"a": noise(24 * SHARD, 1)}, run="stuck")
    good = make_version(1, {"a": noise(24 * SHARD, 2)}, run="good")
    parent = ScriptedParent()
    parent.serve(make_head(stuck, run="stuck"), stuck, run="stuck")
    pauses = [Pause(after=1) for _ in stuck.shards]
    for digest, pause in zip(stuck.shards, pauses, strict=True):
        parent.script(digest, pause)
    few = limits(fill_threads=4, prefetch_fills=4, max_fills=16)
    async with parent.running(), running(config(tmp_path / "r", parent.url, limits=few)) as url:
        await wait_head(url, "stuck")
        parent.serve(make_head(good, run="good"), good, run="good")
        await eventually(lambda: parent.count(stuck.shards) >= 3)
        readers = [
            asyncio.create_task(http(url, path_of(digest, "stuck"))) for digest in stuck.shards
        ]
        await wait_head(url, "good")
        await eventually(lambda: _complete(url, "good"))
        assert await has_all(url, good, "good")
        assert not any(pause.go.is_set() for pause in pauses)
        for pause in pauses:
            pause.go.set()
        await asyncio.gather(*readers)
        await eventually(lambda: _complete(url, "stuck"))


async def _complete(url: str, run: str) -> bool:
    return bool((await status_of(url))["runs"].get(run, {}).get("complete") == 1)


@pytest.mark.fault(18)
async def test_runs_with_bad_heads_and_bad_documents_do_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("garbage", "foreign", "broken", "elsewhere")
    version = make_version(1)
    parent = ScriptedParent()
    parent.heads["garbage"] = b'{"payload": 1}' * 1000
    parent.heads["foreign"] = make_head(make_version(1, run="foreign"), run="foreign", key=5)
    broken = make_version(1, run="broken")
    other = make_version(1, {"x": b"of another run"}, run="someone")
    broken.blobs[broken.ref.manifest] = b"{}"
    parent.serve(make_head(broken, run="broken"), broken, run="broken")
    parent.serve(make_head(other, run="elsewhere"), other, run="elsewhere")
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:

        async def troubled() -> bool:
            runs = (await status_of(url))["runs"]
            return set(names) <= set(runs)

        await eventually(troubled)
        parent.serve(make_head(version), version)
        await wait_head(url)
        await eventually(lambda: _complete(url, RUN))
        assert await has_all(url, version)
        runs = (await status_of(url))["runs"]
        assert all(runs[name]["problem"] for name in ("garbage", "foreign"))
        assert runs["elsewhere"]["versions"][0]["problem"]
        assert runs[RUN]["problem"] is None
        bans = [r.getMessage() for r in caplog.records if "is not asked for" in r.getMessage()]
        assert bans  # for the manifest that is not it, and for nothing else
        assert all(told.startswith("run broken: ") for told in bans)
