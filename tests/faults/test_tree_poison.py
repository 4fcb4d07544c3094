"""Wrong bytes from above: who is banned, for what, and that nobody below ever gets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.config import Prefetch
from relay.siblings import owner_of
from shardcast.protocol.limits import HELD_BACK_BYTES
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import QUICK, config, path_of, running, status_of, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent, etag
from tests.contract.wire_client import Wire, eventually, http
from tests.faults.trees import Node, count_of, get, has_all, pulled, tree

pytestmark = pytest.mark.fault(18)

VERSION = make_version(1, {"model": noise(24 * SHARD)})
BLOB = VERSION.shards[0]
DATA = VERSION.blobs[BLOB]


def spoiled(data: bytes, at: int = 0) -> bytes:
    """The same length, one bit of it wrong."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@asynccontextmanager
async def bad_before_good(
    tmp_path: Path, *versions: MadeVersion, **options: Any
) -> AsyncIterator[tuple[ScriptedParent, ScriptedParent, str]]:
    """A relay on demand below a parent that is asked first and one that is a last resort."""
    versions = versions or (VERSION,)
    bad, good = ScriptedParent(), ScriptedParent(extra={"Shardcast-Depth": "3"})
    for version in versions:
        run = RUN if version is VERSION else "other"
        envelope = make_head(version, run=run)
        for parent in (bad, good):
            parent.serve(envelope, version, run=run)
    options.setdefault("prefetch", Prefetch.DEMAND)
    async with (
        bad.running(),
        good.running(),
        running(config(tmp_path / "r", bad.url, good.url, **options)) as url,
    ):
        for version in versions:
            run = RUN if version is VERSION else "other"
            await wait_head(url, run)
            for digest in version.documents[::-1]:
                assert (await get(url, digest, run)).status == 200
        yield bad, good, url


async def bans_of(url: str, of: str) -> list[dict[str, Any]]:
    """For which runs a relay leaves a server alone."""
    status = await status_of(url)
    (server,) = [s for s in (*status["parents"], *status["siblings"]) if s["url"] == of]
    assert server["banned"] == bool(server["bans"])
    return list(server["bans"])


# --- ranges of a blob in flight -------------------------------------------------------------------


RANGES = [
    "bytes=0-0",
    "bytes=0-99999",
    f"bytes={SHARD // 2}-",
    f"bytes={SHARD - HELD_BACK_BYTES - 1}-{SHARD - HELD_BACK_BYTES}",
    f"bytes={SHARD - 1}-",
    "bytes=-1",
    f"bytes=-{SHARD}",
]


@pytest.mark.parametrize("wrong_at", [0, SHARD // 2, SHARD - 1], ids=["first", "middle", "last"])
async def test_ranges_of_a_poisoned_blob_in_flight_wait_and_are_right(
    tmp_path: Path, wrong_at: int
) -> None:
    async with bad_before_good(tmp_path) as (bad, good, url):
        bad.blobs[BLOB] = spoiled(DATA, wrong_at)
        pause = Pause(after=SHARD - 1)
        bad.script(BLOB, pause)
        path = path_of(BLOB)
        asks: list[tuple[str, dict[str, str]]] = [("GET", {"Range": r}) for r in RANGES]
        asks += [("GET", {"Range": r, "If-Range": etag(BLOB)}) for r in RANGES]
        asks += [("GET", {"Range": RANGES[1], "If-Range": '"another"'}), ("HEAD", {})]
        asks += [("HEAD", {"Range": RANGES[0]}), ("GET", {"Range": f"bytes={SHARD}-"})]
        async with Wire(url) as whole:
            await whole.ask(path)
            await whole.head()
            released = SHARD - HELD_BACK_BYTES
            assert await whole.exactly(released) == bad.blobs[BLOB][:released]  # not known yet
            readers = [asyncio.create_task(http(url, path, *ask)) for ask in asks]
            with pytest.raises(TimeoutError):  # the whole one gets no byte of its end
                await asyncio.wait_for(whole.reader.read(1), 0.3)
            assert not any(
                reader.done()
                for reader, (method, _headers) in zip(readers, asks, strict=True)
                if method == "GET"
            )
            pause.go.set()
            assert await whole.rest() == b""  # and is cut off
        for reader, (method, headers) in zip(readers, asks, strict=True):
            answer = await reader
            part = headers.get("Range", "")
            if method == "HEAD":
                assert (answer.status, answer["Content-Length"]) == (200, str(SHARD))
            elif part == f"bytes={SHARD}-":
                assert (answer.status, answer["Content-Range"]) == (416, f"bytes */{SHARD}")
            elif headers.get("If-Range", etag(BLOB)) != etag(BLOB):
                assert (answer.status, answer.body) == (200, DATA)
            else:
                assert answer.status == 206
                span = answer["Content-Range"].removeprefix("bytes ").split("/")[0]
                first, last = map(int, span.split("-"))
                assert answer.body == DATA[first : last + 1]
        assert (bad.count(BLOB), good.count(BLOB)) == (1, 1)


# --- whom it costs what -------------------------------------------------------------------------


async def test_a_ban_is_for_one_run_is_named_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_version(1, {"model": noise(12 * SHARD, 7)}, run="other")
    net = replace(QUICK, ban_s=5.0)
    async with bad_before_good(tmp_path, VERSION, other, net=net) as (bad, good, url):
        bad.blobs[BLOB] = spoiled(DATA)

        async def right() -> bool:  # who followed the wrong one was cut off
            return (await get(url, BLOB)).body == DATA

        await eventually(right)
        bans = await bans_of(url, bad.url)
        assert [(ban["run"], ban["reason"]) for ban in bans] == [(RUN, "it sent a wrong blob")]
        assert await bans_of(url, good.url) == []
        assert await count_of(url, "shardcast_bans_total") == 1
        assert await count_of(url, "shardcast_wrong_blobs_total") == 1
        said = [record.getMessage() for record in caplog.records]
        assert any(
            bad.url in line and f"run {RUN}" in line and "not asked" in line for line in said
        )
        # The other run goes on to use it, with bytes that are right.
        assert await has_all(url, other, "other")
        assert bad.count(other.shards) == len(other.shards)
        assert good.count(other.shards) == 0

        async def over() -> bool:
            return await bans_of(url, bad.url) == []

        await eventually(over)
        asked = bad.count(VERSION.shards)
        bad.blobs.update(VERSION.blobs)
        assert (await get(url, VERSION.shards[1])).status == 200
        assert await has_all(url, VERSION)
        assert bad.count(VERSION.shards) > asked
        assert await count_of(url, "shardcast_bans_total") == 1


async def test_workers_below_never_meet_the_poison(tmp_path: Path) -> None:
    """Every blob of the first parent is wrong: the relay finds out, its workers never do."""
    second = make_version(2, {"model": noise(12 * SHARD, 2)})
    async with bad_before_good(tmp_path, prefetch=Prefetch.ALL) as (bad, good, url):
        async with running(config(tmp_path / "below", url)) as child:
            await wait_ready(child)
            envelope = make_head(VERSION, second)
            bad.blobs.update({digest: second.blobs[digest] for digest in second.documents})
            for number, digest in enumerate(second.shards):
                bad.blobs[digest] = spoiled(second.blobs[digest], at=number)
            good.serve(envelope, second)
            bad.serve(envelope)
            await eventually(lambda: has_all(child, second))
            await pulled(tmp_path / "out", second, child)
            assert await count_of(child, "shardcast_wrong_blobs_total") == 0
        assert 0 < bad.count(second.shards) < len(second.shards)
        assert len(await bans_of(url, bad.url)) == 1


async def test_a_stitched_blob_that_is_wrong_bans_nobody_and_comes_again_from_one(
    tmp_path: Path,
) -> None:
    async with bad_before_good(tmp_path) as (first, second, url):
        first.blobs[BLOB] = spoiled(DATA)
        pause = Pause(after=100_000, abort=True)
        first.script(BLOB, pause)
        async with Wire(url) as reader:
            await reader.ask(path_of(BLOB))
            await reader.head()
            await reader.exactly(100_000)
            pause.go.set()
            got = 100_000 + len(await reader.rest())
            assert got <= SHARD - HELD_BACK_BYTES  # never the whole of it
        first.blobs[BLOB] = DATA
        assert (await get(url, BLOB)).body == DATA
        asks = [ask for ask in (*first.asks, *second.asks) if ask.digest == BLOB]
        assert [ask.start for ask in asks].count(100_000) == 1  # stitched, once
        assert len(asks) == 3
        assert await bans_of(url, first.url) == await bans_of(url, second.url) == []
        assert await count_of(url, "shardcast_bans_total") == 0
        assert await count_of(url, "shardcast_wrong_blobs_total") == 1


async def test_a_sibling_that_sends_a_wrong_blob_is_banned_and_named(tmp_path: Path) -> None:
    node = "ab" * 16
    origin, sibling = ScriptedParent(), ScriptedParent(extra={"Shardcast-Node": node})
    origin.serve(make_head(VERSION), VERSION)
    sibling.blobs = {digest: spoiled(VERSION.blobs[digest]) for digest in VERSION.shards}
    async with origin.running(), sibling.running():
        relay = Node("r", [origin.url], [sibling.url])
        async with tree(tmp_path, relay, prefetch=Prefetch.DEMAND) as urls:
            url = urls["r"]
            me = (await status_of(url))["node"]
            await wait_head(url)

            async def live() -> bool:
                return bool((await status_of(url))["siblings"][0]["live"])

            await eventually(live)
            owned = [d for d in VERSION.shards if owner_of(d, [me, node]) == node]
            assert owned
            for digest in VERSION.shards:
                assert (await get(url, digest)).body == VERSION.blobs[digest]
            assert sibling.count(VERSION.shards) == 1
            assert origin.count(VERSION.shards) == len(VERSION.shards)
            (ban,) = await bans_of(url, sibling.url)
            assert ban["run"] == RUN
