"""One store, two roles: a relay below parents never takes an origin's store for its own."""

import os
import socket
from pathlib import Path

import pytest

from relay import handover
from relay.keeping import OriginMark
from shardcast.errors import BusyError, UsageError
from tests.contract.made import RUN, SHARD, noise, publish
from tests.contract.relays import config, running, status_of, wait_head

pytestmark = pytest.mark.fault(15)


def published(tmp_path: Path, name: str) -> Path:
    """A store with three versions of a run."""
    for number in (1, 2, 3):
        publish(tmp_path / name, tmp_path / "ckpt", {"model": noise(2 * SHARD, number)})
    return tmp_path / name


def inodes(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in store.rglob("versions/*/*")}


async def test_a_relay_that_keeps_less_does_not_start_in_the_store_of_a_running_origin(
    tmp_path: Path,
) -> None:
    store = published(tmp_path, "store")
    before = inodes(store)
    assert len(before) == 3
    async with running(config(store)) as url, running(config(store)) as second:
        await wait_head(second)  # origins only read, and may do so together
        with pytest.raises(
            UsageError, match=r"an origin's, served by process \d+.*--store"
        ) as refused:
            async with running(config(store, url, keep=1)):
                pass
        assert not isinstance(refused.value, BusyError)  # waiting is no way out
        await wait_head(url)
    assert inodes(store) == before


async def test_a_store_that_was_an_origins_may_become_a_relays(tmp_path: Path) -> None:
    origin, store = published(tmp_path, "origin"), published(tmp_path, "store")
    async with running(config(store)) as url:
        await wait_head(url)
    async with running(config(origin)) as parent, running(config(store, parent)) as url:
        await wait_head(url)
        assert list((await status_of(url))["runs"]) == [RUN]


def test_a_store_that_is_not_there_needs_no_mark(tmp_path: Path) -> None:
    mark = OriginMark(tmp_path / "missing")
    mark.show()
    mark.require_absent()
    mark.hide()
    assert not mark.held


async def test_a_relay_that_is_stopped_is_named_to_whoever_would_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        with handover._short_path(tmp_path / handover.DOOR_NAME) as name:
            door.bind(name)
        door.listen()  # and nobody accepts
        with pytest.raises(BusyError, match=rf"process {os.getpid()}, did not answer .* continue"):
            await handover.find_predecessor(tmp_path)
