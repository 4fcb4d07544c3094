"""Workers whose link is slower than versions come."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from relay import retaining
from relay.config import Prefetch
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.worker import Update, Worker
from tests.contract.made import RUN, SHARD, noise, publish, signer
from tests.contract.relays import config, running, wait_head
from tests.contract.wire_client import eventually, http
from tests.faults.trees import count_of

SHARDS = 8
KEPT = 4
"""How many versions a head lists by default."""


def model(number: int) -> bytes:
    """A version that shares no shard with any other."""
    return noise(SHARDS * SHARD, number)


def blob_path(number: int, shard: int) -> str:
    digest = digest_of(model(number)[shard * SHARD : (shard + 1) * SHARD])
    return f"/v1/{RUN}/blobs/{digest}.bin"


async def publish_versions(root: Path, *numbers: int) -> None:
    for number in numbers:
        source = root / f"ckpt-{number}"
        await asyncio.to_thread(publish, root / "origin", source, {"model": model(number)})


async def status_of(url: str, number: int, shard: int) -> int:
    return (await http(url, blob_path(number, shard))).status


@pytest.mark.fault(16)
async def test_a_version_stays_for_who_is_fetching_it_when_it_leaves_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the origin, and through a relay that has not got it yet."""
    monkeypatch.setattr(retaining, "EVERY_S", 0.05)
    await publish_versions(tmp_path, 1, 2)
    async with running(config(tmp_path / "origin")) as above:
        below = config(tmp_path / "relay", above, prefetch=Prefetch.DEMAND)
        async with running(below) as relay:
            await wait_head(relay)
            assert await status_of(relay, 1, 0) == 200
            await publish_versions(tmp_path, *range(3, 3 + KEPT))
            await eventually(lambda: head_lists(relay, 2 + KEPT), what="the newest head")
            for shard in range(1, SHARDS):
                answer = await http(relay, blob_path(1, shard))
                data = model(1)[shard * SHARD : (shard + 1) * SHARD]
                assert (answer.status, answer.body) == (200, data)
            # Version 2 left the head, too, and nobody was fetching it.
            assert await status_of(relay, 2, 0) == 404
            assert await status_of(above, 2, 0) == 404


async def head_lists(url: str, version: int) -> bool:
    head = decode_head(open_unverified((await http(url, f"/v1/{RUN}/head")).body)[1])
    return head.version == version


@pytest.mark.fault(22)
async def test_a_worker_that_needs_longer_than_versions_stay_reaches_one(tmp_path: Path) -> None:
    """A version comes with each shard that the worker gets, until it has a whole one."""
    await publish_versions(tmp_path, 1)
    slow = config(tmp_path / "origin", limit_rate_bytes_per_s=SHARD)
    async with running(slow) as url:
        worker = Worker(tmp_path / "out", RUN, [url], keys=[signer().public_key])
        async with aclosing(worker.follow()) as updates:
            taking = asyncio.ensure_future(anext(updates))
            published = 1

            async def one_more() -> bool:
                sent = await count_of(url, "shardcast_sent_bytes_total")
                return taking.done() or sent >= published * SHARD

            while not taking.done() and published < 60:
                published += 1
                await publish_versions(tmp_path, published)
                await eventually(one_more, what="the next shard")
            assert taking.done(), f"none of {published} versions was reached"
            update: Update = taking.result()
    assert (update.path / "model").read_bytes() == model(update.version)
    assert published > KEPT + 1  # it was slower than versions stay
