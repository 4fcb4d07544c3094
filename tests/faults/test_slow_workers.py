"""Workers whose link is slower than versions come."""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from relay import retaining
from relay.config import Prefetch
from shardcast.events import EventKind
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.worker import Update, Worker
from tests.contract.made import (
    RUN,
    SHARD,
    MadeVersion,
    make_head,
    make_version,
    noise,
    publish,
)
from tests.contract.relays import config, path_of, running, wait_head
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import PATIENCE_S, eventually, http
from tests.fakes import Action, FakeRun, Request, RunServer, Until
from tests.observer import Log

SHARDS = 8
KEPT = 4
"""How many versions a head lists by default."""
MOST = 2 * SHARDS + 8
"""Each version lets one shard through: a worker that starves gets beyond this."""


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


@pytest.mark.fault(16)
async def test_a_delta_stays_for_who_is_fetching_it_when_its_version_leaves_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it leads to a version on the way only. What nobody has any more is no matter of time."""
    monkeypatch.setattr(retaining, "EVERY_S", 0.05)
    monkeypatch.setattr(retaining, "COLLECT_S", 0.0)
    versions = {n: make_version(n, deltas=[noise(2000, n), noise(1000, n)]) for n in (1, 2, 3)}
    parent = ScriptedParent()
    parent.serve(make_head(versions[1], versions[2]), versions[1], versions[2])
    below = config(tmp_path / "relay", "http://127.0.0.1:9", prefetch=Prefetch.DEMAND)
    async with parent.running(), running(replace(below, parents=(parent.url,))) as relay:
        await wait_head(relay)
        asked, lost = delta_blobs(versions[1])
        other, _ = delta_blobs(versions[2])
        for number in (1, 2):
            for digest in documents(versions[number]):
                assert (await http(relay, path_of(digest))).status == 200
        assert (await http(relay, path_of(asked))).status == 200
        shelved = tmp_path / "relay" / RUN / "blobs" / f"{versions[2].layout}.bin"
        assert shelved.exists()
        for number in (1, 2):
            for digest in versions[number].blobs:
                parent.blobs.pop(digest, None)
        parent.serve(make_head(versions[3]), versions[3])
        await eventually(lambda: head_lists(relay, 3), what="the newest head")
        # Version 2 is collected, and with it whatever nobody was fetching.
        await eventually(lambda: not shelved.exists(), what="a collection")
        assert (await http(relay, path_of(asked))).status == 200
        for digest in documents(versions[1]):
            assert (await http(relay, path_of(digest))).status == 200
        before = parent.count(lost)
        assert (await http(relay, path_of(lost))).status == 404
        assert parent.count(lost) == before + 1  # asked once, not round after round
        assert (await http(relay, path_of(other))).status == 404
        assert parent.count(other) == 0


def delta_blobs(version: MadeVersion) -> list[str]:
    (part,) = version.ref.deltas[0].parts
    return [blob.digest for blob in decode_delta_part(version.blobs[part]).blobs]


def documents(version: MadeVersion) -> list[str]:
    return [version.ref.manifest, version.layout, *version.parts, *version.ref.deltas[0].parts]


@pytest.mark.fault(22)
async def test_a_worker_that_needs_longer_than_versions_stay_reaches_one(tmp_path: Path) -> None:
    """A version comes for each shard that the worker gets, until it has a whole one."""
    run, log, gate = FakeRun(name=RUN), Log(), Gate()
    run.publish({"model": model(1)}, shard_bytes=SHARD)
    with RunServer(run) as server:
        server.fault = lambda r, data: (
            gate.pass_one(server, r, data) if len(data) == SHARD else None
        )
        worker = Worker(tmp_path / "out", RUN, [server.url], keys=run.keys, observer=log)
        async with aclosing(worker.follow()) as updates:
            taking = asyncio.ensure_future(anext(updates))
            published = 1

            async def asks() -> bool:
                return taking.done() or gate.waiting > 0

            def heard() -> bool:
                return any(event.version == published for event in log.of(EventKind.HEAD))

            while not taking.done() and published < MOST:
                published += 1
                run.publish({"model": model(published)}, shard_bytes=SHARD)
                assert run.head is not None
                run.amend(versions=run.head.versions[:KEPT])
                await eventually(heard, what="the newest head at the worker")
                await eventually(asks, what="the next request")
                gate.let_one()
            gate.open()
            async with asyncio.timeout(PATIENCE_S):
                update: Update = await taking
    assert (update.path / "model").read_bytes() == model(update.version)
    assert published > KEPT + 1  # it was slower than versions stay
    assert published < MOST, "none was reached within 1.25 copies, and what was in flight"


class Gate:
    """Lets answers through one by one, in the order of the requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._open = False

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._waiting)

    def pass_one(self, server: RunServer, request: Request, data: bytes) -> Iterable[Action]:
        mine = threading.Event()
        with self._lock:
            if self._open:
                mine.set()
            else:
                self._waiting.append(mine)
        return [Until(mine), *server.good(request, data)]

    def let_one(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()

    def open(self) -> None:
        with self._lock:
            self._open = True
            while self._waiting:
                self._waiting.popleft().set()
