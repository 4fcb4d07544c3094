"""Parents and siblings that die, stop, vanish behind a network or lie, and come back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.config import Prefetch
from shardcast.demo.processes import free_ports
from shardcast.protocol.digest import digest_of
from shardcast.protocol.limits import MAX_DOCUMENT_BYTES
from tests.contract.made import (
    RUN,
    SHARD,
    MadeVersion,
    make_head,
    make_version,
    noise,
    publish,
)
from tests.contract.relays import QUICK, config, process, running, status_of, wait_head, wait_ready
from tests.contract.scripted import Ask, Pause, ScriptedParent, start_of
from tests.contract.wire_client import PATIENCE_S, eventually
from tests.faults.machine import Networks, stopped
from tests.faults.trees import count_of, depth_of, get, has_all, pulled, statuses

VERSIONS = [make_version(n, {"model": noise(24 * SHARD, n)}) for n in (1, 2, 3)]
FIRST, SECOND, THIRD = VERSIONS
PATIENT = replace(QUICK, read_timeout_s=120.0, header_timeout_s=120.0, rate_window_s=120.0)
"""No timeout of a transfer ends within these tests: who is silent must be found out otherwise."""


async def learn(url: str, version: MadeVersion) -> None:
    """Make a relay on demand know what a version's shards are."""
    await wait_head(url)

    async def known() -> bool:
        return [(await get(url, d)).status for d in version.documents[::-1]] == [200] * 3

    await eventually(known)


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.fault(3)
async def test_a_relay_killed_within_a_fill_asks_again_for_that_shard_alone(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(FIRST), FIRST)
    victim = FIRST.shards[3]
    pause = Pause(after=SHARD - 100)
    parent.script(victim, pause)
    async with parent.running():
        async with process(tmp_path / "r", "--parent", parent.url) as (url, relay):
            await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)

            async def others() -> bool:
                version = (await status_of(url))["runs"][RUN]["versions"][0]
                return bool(version["present"] == len(FIRST.shards) - 1)

            await eventually(others)
            reader = asyncio.create_task(get(url, victim))
            await eventually(lambda: _reading(url, victim))
            relay.kill()
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert not (await reader).whole  # if it was told the length at all
        pause.go.set()
        before = parent.sent
        async with process(tmp_path / "r", "--parent", parent.url) as (url, _):
            await wait_ready(url)
            assert await has_all(url, FIRST)
        assert parent.sent - before == SHARD


async def _reading(url: str, digest: str) -> bool:
    return any(fill["digest"] == digest for fill in (await status_of(url))["fills"])


@pytest.mark.fault(12)
async def test_a_stopped_sibling_costs_one_lesson_and_is_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = ScriptedParent()
    origin.serve(make_head(FIRST), FIRST)
    (port,) = free_ports(1)
    me = f"http://127.0.0.1:{port}"
    async with origin.running():
        there = ("--parent", origin.url, "--sibling", me, "--prefetch", "demand")
        async with process(tmp_path / "sibling", *there) as (sibling, its):
            mine = config(
                tmp_path / "me",
                origin.url,
                siblings=(sibling,),
                listen=f"127.0.0.1:{port}",
                prefetch=Prefetch.DEMAND,
                net=PATIENT,
            )
            async with running(mine):
                for url in (sibling, me):
                    await learn(url, FIRST)
                    await eventually(lambda url=url: _live(url))

                def lessons() -> int:
                    said = [record.getMessage() for record in caplog.records]
                    return sum("is too slow or silent" in line for line in said)

                with stopped(its.pid):
                    assert set(await statuses(me, FIRST.shards)) == {200}
                    learnt = lessons()
                    assert 0 < learnt <= len(FIRST.shards)
                    assert not await _live(me)
                    origin.serve(make_head(FIRST, SECOND), SECOND)
                    await learn(me, SECOND)
                    assert set(await statuses(me, SECOND.shards)) == {200}
                    assert lessons() == learnt  # nobody waits for it any more
                await eventually(lambda: _live(me))
                origin.serve(make_head(*VERSIONS), THIRD)
                for url in (me, sibling):
                    await learn(url, THIRD)
                before = await count_of(
                    sibling, "shardcast_requests_total", endpoint="blobs", status="200"
                )
                assert set(await statuses(me, THIRD.shards)) == {200}
                after = await count_of(
                    sibling, "shardcast_requests_total", endpoint="blobs", status="200"
                )
                assert after > before
                assert origin.count(THIRD.shards) == len(THIRD.shards)


async def _live(url: str) -> bool:
    return all(sibling["live"] for sibling in (await status_of(url))["siblings"])


@pytest.mark.fault(12)
async def test_a_stopped_parent_is_gone_around_and_used_again(tmp_path: Path) -> None:
    origin = ScriptedParent()
    origin.serve(make_head(FIRST), FIRST)
    async with origin.running():
        second = config(tmp_path / "p2", origin.url)
        async with (
            process(tmp_path / "p1", "--parent", origin.url) as (one, its),
            running(second) as two,
        ):
            mine = config(tmp_path / "me", one, two, prefetch=Prefetch.DEMAND, net=PATIENT)
            async with running(mine) as me:
                await learn(me, FIRST)
                for url in (one, two):
                    await wait_ready(url)
                await eventually(lambda: _used(me, {one, two}))
                with stopped(its.pid):
                    assert set(await statuses(me, FIRST.shards)) == {200}
                    await eventually(lambda: _used(me, {two}))
                await eventually(lambda: _used(me, {one, two}))
                more = make_version(2, {"model": noise(48 * SHARD, 9)})
                origin.serve(make_head(FIRST, more), more)
                for url in (one, two):
                    await eventually(lambda url=url: has_all(url, more))
                await learn(me, more)
                before = await count_of(one, "shardcast_requests_total", endpoint="blobs")
                assert await has_all(me, more)
                after = await count_of(one, "shardcast_requests_total", endpoint="blobs")
                assert after > before


async def _used(url: str, wanted: set[str]) -> bool:
    parents = (await status_of(url))["parents"]
    return {parent["url"] for parent in parents if parent["used"]} == wanted


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.fault(17)
async def test_a_network_that_loses_everything_and_comes_back(tmp_path: Path) -> None:
    """origin | relay | relay | worker, each over a cable; the first one loses all packets."""
    files = {"model": noise(32 * SHARD, 5)}
    version = make_version(1, files)
    await asyncio.to_thread(publish, tmp_path / "o", tmp_path / "c", files)
    with Networks() as networks:
        above, below = networks.namespace(), networks.namespace()
        for space in (above, below):
            space.limit("16mbit")  # slow enough that much is still to come when it breaks
        first = process(tmp_path / "o", listen=f"{above.there}:0", inside=above.argv())
        async with (
            first as (origin, _),
            running(config(tmp_path / "r1", origin, listen=f"{below.here}:0")) as one,
            process(
                tmp_path / "r2",
                *("--parent", one),
                listen=f"{below.there}:0",
                inside=below.argv(),
            ) as (two, _),
        ):
            await wait_head(two)
            worker = asyncio.create_task(pulled(tmp_path / "out", version, two))
            await eventually(lambda: _present(one, 4))
            with above.dropped():
                await eventually(lambda: _lost(one))
                assert 4 <= await _shards(one) < 32
                assert await depth_of(one) == 16
                assert not worker.done()
            await eventually(lambda: _used(one, {origin}))
            await asyncio.wait_for(worker, 40)
            for url in (one, two):
                await wait_ready(url)
            assert [await depth_of(one), await depth_of(two)] == [1, 2]
            sent = await count_of(origin, "shardcast_sent_bytes_total")
            needed = sum(map(len, version.blobs.values()))
            assert sent <= needed + 8 * SHARD  # at most a shard again for each connection


async def _shards(url: str) -> int:
    versions = (await status_of(url))["runs"].get(RUN, {"versions": []})["versions"]
    return int(versions[0]["present"]) if versions else 0


async def _present(url: str, count: int) -> bool:
    return await _shards(url) >= count


async def _lost(url: str) -> bool:
    status: Any = await status_of(url)
    return not any(parent["live"] for parent in status["parents"])


# --- lies -----------------------------------------------------------------------------------------


def _endless(length: int) -> Any:
    async def script(ask: Ask, writer: asyncio.StreamWriter) -> None:
        writer.write(start_of(200, length))
        for _ in range(64):
            writer.write(bytes(64 * 1024))
            await writer.drain()

    return script


def _lies(liar: ScriptedParent, kind: str) -> None:
    """Make a parent lie. It had version 1; version 2 is the newest."""
    match kind:
        case "frozen head":
            pass
        case "older head":
            liar.serve(make_head(FIRST, sequence=10))
        case "foreign head":
            liar.serve(make_head(THIRD, key=7))
        case "head of another run":
            liar.heads[RUN] = make_head(make_version(1, run="other"), run="other")
        case "shards of another version":
            liar.serve(make_head(FIRST, SECOND), SECOND)
            liar.blobs.update(
                {d: FIRST.blobs[e] for d, e in zip(SECOND.shards, FIRST.shards, strict=True)}
            )
        case "huge manifest":
            liar.serve(make_head(FIRST, SECOND), SECOND)
            liar.script(SECOND.ref.manifest, *[_endless(MAX_DOCUMENT_BYTES + 1)] * 50)
        case "endless blobs":
            liar.serve(make_head(FIRST, SECOND), SECOND)
            for digest in SECOND.shards:
                liar.script(digest, *[_endless(1 << 40)] * 50)
        case "documents of another version":
            liar.serve(make_head(FIRST, SECOND), SECOND)
            for digest, other in zip(SECOND.documents, FIRST.documents, strict=True):
                liar.blobs[digest] = FIRST.blobs[other]


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    "kind",
    [
        "frozen head",
        "older head",
        "foreign head",
        "head of another run",
        "shards of another version",
        "huge manifest",
        "endless blobs",
        "documents of another version",
    ],
)
async def test_a_parent_that_lies_delays_nothing_for_good(tmp_path: Path, kind: str) -> None:
    """It claims to be the origin itself, so it is asked first."""
    liar, honest = ScriptedParent(), ScriptedParent(extra={"Shardcast-Depth": "2"})
    for parent in (liar, honest):
        parent.serve(make_head(FIRST, sequence=10**12), FIRST)
    async with (
        liar.running(),
        honest.running(),
        running(config(tmp_path / "r", liar.url, honest.url)) as url,
    ):
        await wait_ready(url)
        _lies(liar, kind)
        honest.serve(make_head(FIRST, SECOND), SECOND)
        liar.cut()
        await eventually(lambda: has_all(url, SECOND))
        await pulled(tmp_path / "out", SECOND, url)
        directory = tmp_path / "r" / RUN / "versions" / "000002"
        await eventually(directory.is_dir)
        for path, data in SECOND.files.items():
            found = await asyncio.to_thread((directory / path).read_bytes)
            assert digest_of(found) == digest_of(data)
