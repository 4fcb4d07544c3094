"""A relay that works on its own disk: who asks for a shard meanwhile waits a moment, for that alone."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from relay import node, salvaging
from relay.config import Prefetch
from shardcast.protocol.digest import digest_of
from shardcast.salvage import salvage
from shardcast.store.stored import StoredVersion
from tests.contract.made import RUN, SHARD, make_head, make_version, noise
from tests.contract.relays import config, path_of, running, wait_head
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import PATIENCE_S, Answer, Wire, eventually, http

VERSION = make_version(1, {"model": noise(4 * SHARD)})
FIRST, LOST, HALF, NEVER = VERSION.shards


class Salvage:
    """Stands in for the salvage of shards: begins when told to."""

    def __init__(self) -> None:
        self.looked: list[set[int]] = []
        self.go = threading.Event()

    def __call__(self, stored: StoredVersion, shards: Iterable[int]) -> int:
        self.looked.append(set(shards))
        assert self.go.wait(PATIENCE_S)
        return salvage(stored, self.looked[-1])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Salvage:
    made = Salvage()
    monkeypatch.setattr(salvaging, "salvage", made)
    return made


async def begun(store: Path, parent: ScriptedParent) -> None:
    """A relay that ended when it had one shard, another without a record, and half of a third."""
    async with running(config(store, parent.url, prefetch=Prefetch.DEMAND)) as url:
        await wait_head(url)
        for digest in (*VERSION.documents[::-1], FIRST):
            assert (await http(url, path_of(digest))).status == 200
    (file,) = (store / RUN / "state" / "staging" / "000001").rglob("model*")
    with file.open("r+b") as out:
        out.seek(SHARD)
        out.write(VERSION.blobs[LOST] + VERSION.blobs[HALF][: SHARD // 2])


def right(answer: Answer, digest: str) -> bool:
    return (answer.status, digest_of(answer.body)) == (200, digest)


async def test_a_request_waits_until_its_shard_was_looked_at_and_no_other_does(
    tmp_path: Path, held: Salvage
) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        await begun(tmp_path, parent)
        async with running(config(tmp_path, parent.url)) as url, Wire(url) as wire:
            await eventually(lambda: bool(held.looked))
            assert held.looked == [{1, 2}]  # what nobody wrote is not looked at
            await wire.ask(path_of(LOST))
            half = asyncio.create_task(http(url, path_of(HALF)))
            for digest in (FIRST, NEVER):
                assert right(await http(url, path_of(digest)), digest)
            assert not half.done()
            held.go.set()
            assert right(await wire.answer(), LOST)
            assert right(await asyncio.wait_for(half, PATIENCE_S), HALF)
            assert [parent.count(digest) for digest in VERSION.shards] == [1, 0, 1, 1]


async def test_a_request_does_not_wait_for_ever(
    tmp_path: Path, held: Salvage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "CLAIM_WAIT_S", 0.05)
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        await begun(tmp_path, parent)
        async with running(config(tmp_path, parent.url)) as url:
            await eventually(lambda: bool(held.looked))
            answer = await http(url, path_of(LOST))
            assert answer.status == 503
            assert b"shard 1 of version 1 is being written" in answer.body
            held.go.set()


async def test_a_version_is_looked_at_in_parts(
    tmp_path: Path, held: Salvage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvaging, "PART_BYTES", SHARD)
    held.go.set()
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        await begun(tmp_path, parent)
        async with running(config(tmp_path, parent.url)) as url:
            await eventually(lambda: len(held.looked) == 2)
            assert held.looked == [{1}, {2}]
            assert right(await http(url, path_of(HALF)), HALF)
    assert parent.count(LOST) == 0
