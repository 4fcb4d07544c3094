"""Retention looks for leftovers now and then, whether or not a new head comes."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relay import retaining
from relay.responses import Responses
from relay.retaining import COLLECT_S, Retention
from relay.runs import RelayRun
from shardcast.protocol.digest import digest_of
from shardcast.store.run import RunStore
from tests.clock import Clock
from tests.contract.wire_client import PATIENCE_S, eventually


async def test_leftovers_are_looked_for_without_a_new_head(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, ...]] = []

    def collected(store: RunStore, numbers: tuple[int, ...], *, keep: frozenset[str]) -> Any:
        looks.append(tuple(numbers))
        return SimpleNamespace(versions=())

    monkeypatch.setattr(retaining, "collect", collected)
    clock = Clock()
    retention = Retention(cast(Any, SimpleNamespace(clock=clock, responses=Responses(clock))))
    run = RelayRun(RunStore(tmp_path, "policy"))
    await retention.apply(run)
    await retention.apply(run)
    assert len(looks) == 1  # nothing has changed
    clock.now += COLLECT_S
    await retention.apply(run)
    assert len(looks) == 2


async def test_nothing_is_remembered_of_what_was_collected(tmp_path: Any) -> None:
    clock = Clock()
    retention = Retention(cast(Any, SimpleNamespace(clock=clock, responses=Responses(clock))))
    run = RelayRun(RunStore(tmp_path, "policy"), clock)
    for number in range(3):
        data = b"delta %d" % number
        run.store.write_blob(digest_of(data), data)
        assert run.shelf.holds(digest_of(data))
        run.used[number] = clock()
    await retention.apply(run)
    assert run.store.blobs() == []  # nothing names them
    assert not run.shelf.verified
    assert not run.used  # no such version is here, and nobody fetches one


async def test_a_collection_that_has_begun_ends_before_its_task_does(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process has the store once the tasks of this one have ended."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def collected(*_: Any, **__: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE_S)
        ended.set()
        return SimpleNamespace(versions=())

    monkeypatch.setattr(retaining, "collect", collected)
    clock = Clock()
    retention = Retention(cast(Any, SimpleNamespace(clock=clock, responses=Responses(clock))))
    task = asyncio.create_task(retention.apply(RelayRun(RunStore(tmp_path, "policy"))))
    await eventually(begun.is_set)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
