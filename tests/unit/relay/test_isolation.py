"""One bad run, and all the others."""

import logging
from pathlib import Path

import pytest

from relay.isolation import for_each
from relay.runs import RelayRun
from shardcast.errors import DiskError
from shardcast.store.run import RunStore


async def test_trouble_with_one_run_keeps_none_of_the_others_from_its_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [RelayRun(RunStore(tmp_path / name, name)) for name in ("a", "b", "c", "d")]
    seen: list[str] = []

    async def act(run: RelayRun) -> None:
        seen.append(run.name)
        if run.name == "a":
            raise DiskError("the disk says no", source="/somewhere")
        if run.name == "b":
            raise RuntimeError("never thought of")

    with caplog.at_level(logging.WARNING):
        await for_each(runs, "retention", act)
    assert seen == ["a", "b", "c", "d"]
    assert "run a: retention: the disk says no" in caplog.text
    assert "run b: retention broke; the other runs go on" in caplog.text
    assert "never thought of" in caplog.text
