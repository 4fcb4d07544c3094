"""Retention looks for leftovers now and then, whether or not a new head comes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relay import retaining
from relay.retaining import COLLECT_S, Retention
from relay.runs import RelayRun
from shardcast.store.run import RunStore
from tests.clock import Clock


async def test_leftovers_are_looked_for_without_a_new_head(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, ...]] = []

    def collected(store: RunStore, numbers: tuple[int, ...], *, keep: frozenset[str]) -> Any:
        looks.append(tuple(numbers))
        return SimpleNamespace(versions=())

    monkeypatch.setattr(retaining, "collect", collected)
    clock = Clock()
    retention = Retention(cast(Any, SimpleNamespace(clock=clock)))
    run = RelayRun(RunStore(tmp_path, "policy"))
    await retention.apply(run)
    await retention.apply(run)
    assert len(looks) == 1  # nothing has changed
    clock.now += COLLECT_S
    await retention.apply(run)
    assert len(looks) == 2
