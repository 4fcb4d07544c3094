"""One store, two roles: a relay below parents never takes an origin's store for its own."""

import dataclasses
import logging
import os
import socket
from pathlib import Path

import pytest

from relay import handover
from relay.keeping import OriginMark
from shardcast import announcing
from shardcast.errors import BusyError, StateError, UsageError
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.protocol.manifest import Version, contradicts
from shardcast.store.locks import FileLock
from shardcast.store.roles import (
    RELAY_LOCK,
    Role,
    claim_for_publishing,
    claim_role,
    require_role,
    role_of,
)
from shardcast.store.run import RunStore
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, noise, publish, signer
from tests.contract.relays import config, path_of, running, status_of, wait_head, wait_ready
from tests.contract.wire_client import http

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


async def test_a_store_that_was_an_origins_becomes_a_relays_only_where_that_is_meant(
    tmp_path: Path,
) -> None:
    origin, store = published(tmp_path, "origin"), published(tmp_path, "store")
    before = inodes(store)
    async with running(config(origin)) as parent:
        with pytest.raises(UsageError, match=rf"{store} is an origin's.*--store.*--take-over"):
            async with running(config(store, parent, keep=1)):
                pass
        assert (inodes(store), role_of(store)) == (before, Role.ORIGIN)
        async with running(config(store, parent, take_over=True)) as url:
            await wait_head(url)
            assert list((await status_of(url))["runs"]) == [RUN]
        assert role_of(store) is Role.RELAY
        async with running(config(store, parent)) as url:  # and stays one
            await wait_head(url)


async def test_a_relays_store_is_not_published_into_whether_or_not_it_runs(tmp_path: Path) -> None:
    origin, store = published(tmp_path, "origin"), tmp_path / "store"
    files = {"model": noise(SHARD, 9)}
    async with running(config(origin)) as parent:
        async with running(config(store, parent)) as url:
            await wait_ready(url)
            head = (store / RUN / "head.json").read_bytes()
            with pytest.raises(UsageError, match=rf"{store} is a relay's.*--store.*--take-over"):
                publish(store, tmp_path / "ckpt", files)
            with pytest.raises(UsageError, match=r"process \d+, a relay: end it first"):
                publish(store, tmp_path / "ckpt", files, take_over=True)
        with pytest.raises(UsageError, match="is a relay's"):
            publish(store, tmp_path / "ckpt", files)
        with pytest.raises(UsageError, match="is a relay's"):
            announcing.amend(
                Store(store).run(RUN), [signer()], lambda: 0, lambda head, _issue: head
            )
        assert (store / RUN / "head.json").read_bytes() == head
        token = tmp_path / "token"
        token.write_text("a token that is long enough")
        with pytest.raises(UsageError, match="is a relay's"):
            async with running(config(store, publish_token_file=token)):
                pass
        publish(store, tmp_path / "ckpt", files, take_over=True)
        assert role_of(store) is Role.ORIGIN
        async with running(config(store, publish_token_file=token)) as url:
            await wait_head(url)


async def test_a_store_without_a_mark_gets_one_by_what_is_found(tmp_path: Path) -> None:
    origin, store = published(tmp_path, "origin"), tmp_path / "store"
    assert (role_of(origin), role_of(store)) == (Role.ORIGIN, None)
    (origin / ".role").unlink()
    assert role_of(origin) is None
    async with running(config(origin)) as parent:  # one that only reads writes no mark of its own
        assert not (origin / ".role").exists()
        assert role_of(origin) is Role.ORIGIN  # but it was here
        async with running(config(store, parent)) as url:
            await wait_ready(url)
        (store / ".role").unlink()
        async with running(config(store, parent)) as url:
            await wait_ready(url)
        assert role_of(store) is Role.RELAY


def test_the_first_of_two_that_mark_a_store_at_once_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = require_role

    def faster(root: Path, role: Role, *, take_over: bool = False) -> None:
        checked(root, role, take_over=take_over)
        (root / ".role").write_text("relay\n")

    monkeypatch.setattr("os.path.lexists", lambda _path: False)
    monkeypatch.setattr("shardcast.store.roles.require_role", faster)
    with pytest.raises(UsageError, match="is a relay's"):
        claim_role(tmp_path, Role.ORIGIN)
    assert role_of(tmp_path) is Role.RELAY


def test_a_mark_that_says_nothing_stops_whoever_would_write(tmp_path: Path) -> None:
    (tmp_path / ".role").write_bytes(b"\xff")
    for role in Role:
        with pytest.raises(StateError, match=r"damaged.*--take-over"):
            claim_role(tmp_path, role)
    claim_for_publishing(tmp_path, take_over=True)
    assert role_of(tmp_path) is Role.ORIGIN
    with FileLock(tmp_path / RELAY_LOCK, what="the store"):  # an origin that accepts uploads
        claim_for_publishing(tmp_path, take_over=True)


def newest(store: Path) -> tuple[RunStore, Version]:
    """A run, and its version 3 as its documents say."""
    run = Store(store).run(RUN)
    data = run.read_head()
    assert data is not None
    ref = decode_head(open_unverified(data)[1]).ref(3)
    assert ref is not None
    version = run.load_version(ref)
    assert version is not None
    return run, version


async def test_a_version_that_contradicts_the_head_makes_room_for_the_right_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As an older release let somebody publish into a relay's store."""
    origin, store = published(tmp_path, "origin"), published(tmp_path, "store")
    _run, right = newest(origin)
    for name in ("head.json", "state/trust.json", "../.role"):
        (store / RUN / name).unlink()
    with caplog.at_level(logging.WARNING):
        async with running(config(origin)) as parent, running(config(store, parent)) as url:
            await wait_ready(url)
            for digest in right.shards_of():
                assert (await http(url, path_of(digest))).status == 200
    assert "version 3 on disk is not the publisher's: removed, and fetched again" in caplog.text
    stored = Store(store).run(RUN).stored(3)
    assert stored is not None
    assert not contradicts(stored.version, right)


def test_only_who_may_replace_a_committed_version_does(tmp_path: Path) -> None:
    """Also one that differs in its shards only; and not while somebody reads it."""
    run, mine = newest(published(tmp_path, "origin"))
    shards = dataclasses.replace(mine, manifest="0" * 64)
    layout = dataclasses.replace(shards, layout_digest="1" * 64)
    with pytest.raises(StateError, match="has layout"):
        run.stage(layout)
    stored = run.stored(3)
    assert stored is not None
    with stored.lease(), pytest.raises(StateError, match="has layout"):
        Store(tmp_path / "origin").run(RUN).stage(layout, replace=True)
    assert not run.stage(shards, replace=True).committed
    assert not run.version_directory(3).exists()


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
