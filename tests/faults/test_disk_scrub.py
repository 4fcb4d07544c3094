"""Bits that flip under a relay, an origin and a worker that serves: found, told, repaired."""

import asyncio
import logging
import mmap
import re
from pathlib import Path

import pytest

from relay import scrub
from shardcast.cli.serving import serve_out
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish
from tests.contract.relays import config, metric, path_of, running, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import eventually, http
from tests.fakes import FakeRun, RunServer
from tests.faults.machine import flip_bit
from tests.faults.world import worker

FILES = {"big": noise(4 * SHARD, 1), "small": noise(1000, 2)}
VERSION = make_version(1, FILES, deltas=[noise(50_000, 5)])
FAST = 1 << 30


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass begins soon after the last one."""
    monkeypatch.setattr(scrub, "IDLE_S", 0.1)


@pytest.mark.fault(5)
async def test_a_relay_finds_a_flip_and_fetches_that_shard_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url, scrub_rate_bytes_per_s=FAST)
        async with running(settings) as url:
            await wait_ready(url)
            directory = tmp_path / "r" / RUN / "versions" / "000001"
            await eventually(directory.is_dir)
            for digest in VERSION.shards:
                await http(url, path_of(digest))  # verified: from now on only times are compared
            parent.asks.clear()
            flip_bit(directory / "big", 2 * SHARD + 9)
            await eventually(lambda: (directory / "big").read_bytes() == FILES["big"])
            await wait_ready(url)
            assert [ask.digest for ask in parent.asks] == [VERSION.shards[2]]
            assert await metric(url, "shardcast_scrub_damaged_shards_total") == 1
            assert await metric(url, "shardcast_scrubbed_bytes_total") >= 4 * SHARD
            for digest in VERSION.shards:
                assert (await http(url, path_of(digest))).body == VERSION.blobs[digest]
            status = (await http(url, "/v1/status")).body.decode()
            assert re.search(r'"scrub":{[^}]*"damaged":1', status)
    assert "big, shard 2: its bytes on disk changed; it is fetched again" in caplog.text


@pytest.mark.fault(5)
async def test_a_relay_finds_a_flip_in_a_delta_blob_and_in_a_document(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    (delta,) = (
        set(VERSION.blobs)
        - set(VERSION.shards)
        - set(VERSION.documents)
        - {VERSION.ref.deltas[0].parts[0]}
    )
    async with parent.running():
        settings = config(tmp_path / "r", parent.url, scrub_rate_bytes_per_s=FAST)
        async with running(settings) as url:
            await wait_ready(url)
            blobs = tmp_path / "r" / RUN / "blobs"
            for digest in (delta, VERSION.layout):
                path = blobs / f"{digest}.bin"
                await eventually(path.is_file)
                assert (await http(url, path_of(digest))).body == VERSION.blobs[digest]
                parent.asks.clear()
                flip_bit(path, 40)

                def repaired(path: Path = path, digest: str = digest) -> bool:
                    return path.exists() and path.read_bytes() == VERSION.blobs[digest]

                await eventually(repaired)
                assert parent.count(digest) == 1


@pytest.mark.fault(5)
async def test_a_flip_is_repaired_from_another_version_on_this_disk(tmp_path: Path) -> None:
    parent = ScriptedParent()
    newer = make_version(2, {**FILES, "small": noise(1000, 3)})
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url, scrub_rate_bytes_per_s=FAST)
        async with running(settings) as url:
            await wait_ready(url)
            parent.serve(make_head(VERSION, newer), newer)
            directory = tmp_path / "r" / RUN / "versions"
            await eventually((directory / "000002").is_dir)
            parent.asks.clear()
            flip_bit(directory / "000001" / "big", 9)
            await eventually(lambda: (directory / "000001" / "big").read_bytes() == FILES["big"])
            assert parent.count(VERSION.shards) == 0


@pytest.mark.fault(5)
async def test_an_origin_marks_the_version_and_stops_serving_that_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", FILES)
    async with running(config(tmp_path / "s", scrub_rate_bytes_per_s=FAST)) as url:
        await wait_ready(url)
        for digest in VERSION.shards:
            assert (await http(url, path_of(digest))).status == 200
        flip_bit(tmp_path / "s" / RUN / "versions" / "000001" / "big", SHARD + 1)

        async def noticed() -> bool:
            return await metric(url, "shardcast_damaged_versions") == 1

        await eventually(noticed)
        statuses = [(await http(url, path_of(digest))).status for digest in VERSION.shards]
        assert statuses == [200, 404, 200, 200, 200]
        assert (await http(url, "/readyz")).status == 503
        status = (await http(url, "/v1/status")).body.decode()
        assert '"damaged":"version 1, big, shard 1: its bytes on disk changed"' in status
    assert "nobody can repair it here: publish it again" in caplog.text
    # The next process knows it too, without reading everything first.
    async with running(config(tmp_path / "s")) as url:
        await eventually(lambda: "version 1" in caplog.text)
        assert (await http(url, path_of(VERSION.shards[1]))).status == 404


@pytest.mark.fault(5)
async def test_no_scrub_means_none(tmp_path: Path) -> None:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", FILES)
    async with running(config(tmp_path / "s", scrub_rate_bytes_per_s=0)) as url:
        await wait_ready(url)
        assert await metric(url, "shardcast_scrubbed_bytes_total") == 0


@pytest.mark.fault(5)
async def test_a_worker_that_serves_repairs_its_version_under_its_readers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine has the file mapped: not a byte of that is written to; the name gets a new file."""
    run = FakeRun()
    run.publish(FILES)
    out = tmp_path / "out"
    with RunServer(run) as server:
        follower = worker(out, run, server.url)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def follow() -> None:
            async for _ in follower.follow():
                pass

        tasks = [asyncio.create_task(follow())]
        try:
            path = out / "versions" / "000001" / "big"
            await eventually(path.exists)
            tasks.append(
                asyncio.create_task(
                    serve_out(
                        out,
                        run.name,
                        "127.0.0.1:0",
                        url.set_result,
                        depth=lambda: 1,
                        repair=follower.repair,
                        scrub_rate_bytes_per_s=FAST,
                    )
                )
            )
            base = await asyncio.wait_for(url, 20)
            digest = run.shard_digests(1)[2]
            await eventually(lambda: _is_served(base, digest))
            server.sent.clear()
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                inode = path.stat().st_ino
                flip_bit(path, 2 * SHARD + 9)

                flipped = bytes(view)
                await eventually(lambda: path.read_bytes() == FILES["big"])
                assert path.stat().st_ino != inode
                assert bytes(view) == flipped != FILES["big"]
            assert server.sent == {digest: SHARD}
            await eventually(lambda: _is_served(base, digest))
            answer = await http(base, f"/v1/{run.name}/blobs/{digest}.bin")
            assert answer.body == FILES["big"][2 * SHARD : 3 * SHARD]
        finally:
            for task in reversed(tasks):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    assert "the worker fetches it again" in caplog.text
    assert logging.getLogger("relay.origin").isEnabledFor(
        logging.ERROR
    )  # quiet while it served only


async def _is_served(url: str, digest: str) -> bool:
    return (await http(url, f"/v1/policy/blobs/{digest}.bin")).status == 200
