"""A new run, and a new head, are seen whatever happens to those who ask for them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from relay import origin as origin_feed
from relay.following import MAX_STRANGE_RUNS, ParentFeed
from relay.runs import RelayRun
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish
from tests.contract.relays import QUICK, config, running, status_of, wait_head, wait_ready
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import Wire, eventually, http
from tests.faults.trees import Node, has_all, tree

VERSION = make_version(1)


@pytest.mark.fault(10)
async def test_an_origin_serves_a_run_though_the_first_who_asked_for_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request makes the origin look; it leaves while the head is being taken in."""
    monkeypatch.setattr(origin_feed, "LOOK_S", 3600.0)  # only a request makes it look for runs
    reached, go = asyncio.Event(), asyncio.Event()
    load = RelayRun.load_documents

    async def slow(self: RelayRun, number: int) -> object:
        reached.set()
        await go.wait()
        return await load(self, number)

    async with running(config(tmp_path / "s")) as url:
        await eventually(lambda: _ok(url))
        monkeypatch.setattr(RelayRun, "load_documents", slow)
        await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", {"a": noise(1000)})
        async with Wire(url) as impatient:
            await impatient.ask(f"/v1/{RUN}/head")
            await asyncio.wait_for(reached.wait(), 10)
        reached.clear()
        await asyncio.wait_for(reached.wait(), 10)  # somebody else goes on where it stopped
        go.set()
        await wait_head(url)


async def _ok(url: str) -> bool:
    return (await http(url, "/healthz")).status == 200


@pytest.mark.fault(10)
async def test_a_relay_follows_a_run_though_the_first_who_asked_for_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = asyncio.Event(), asyncio.Event()
    resume = ParentFeed._resume

    async def slow(self: ParentFeed, run: RelayRun) -> None:
        reached.set()
        await go.wait()
        await resume(self, run)

    parent = ScriptedParent()
    seldom = replace(QUICK, head_poll_s=3600.0)  # only a request makes it look for runs
    async with parent.running(), running(config(tmp_path / "r", parent.url, net=seldom)) as url:
        await eventually(lambda: _ok(url))
        assert (await http(url, f"/v1/{RUN}/head")).status == 404
        monkeypatch.setattr(ParentFeed, "_resume", slow)
        parent.serve(make_head(VERSION), VERSION)

        async def ask_and_leave() -> bool:
            async with Wire(url) as impatient:
                await impatient.ask(f"/v1/{RUN}/head")
                try:
                    await asyncio.wait_for(reached.wait(), 0.3)
                except TimeoutError:
                    return False
            return True

        await eventually(ask_and_leave)
        go.set()
        await wait_ready(url)


@pytest.mark.fault(10)
async def test_siblings_see_each_new_run(tmp_path: Path) -> None:
    """One run after the other appears at a real origin below which three siblings wait."""
    runs = [f"run-{number}" for number in range(12)]
    async with running(config(tmp_path / "o")) as origin:
        nodes = [Node(name, [origin], ["a", "b", "c"]) for name in "abc"]
        async with tree(tmp_path, *nodes) as urls:
            for number, run in enumerate(runs):
                files = {"model": noise(3 * SHARD, number)}
                await asyncio.to_thread(publish, tmp_path / "o", tmp_path / run, files, run=run)
                for url in urls.values():
                    await wait_head(url, run)
            for url in urls.values():
                await wait_ready(url)


@pytest.mark.fault(18)
async def test_a_flood_of_runs_that_nobody_can_trust_leaves_room_for_the_others(
    tmp_path: Path,
) -> None:
    """A parent names ten thousand runs, with heads of a foreign key, and names that are none."""
    liar, honest = ScriptedParent(), ScriptedParent()
    bogus = [f"bogus-{number:05d}" for number in range(10_000)]
    bad = ["../../etc", "", "UPPER", "a/b", "x" * 10_000, "runs", "\u202e"]
    for name in bogus[:200]:
        liar.heads[name] = make_head(make_version(1, run=name), run=name, key=9)
    liar.heads.update(dict.fromkeys([*bad, *bogus[200:]], b"{}"))
    real = [make_version(1, {"a": noise(1000, n)}, run=f"real-{n}") for n in range(20)]
    async with liar.running(), honest.running():
        async with running(config(tmp_path / "r", liar.url, honest.url)) as url:
            await eventually(lambda: _followed(url, MAX_STRANGE_RUNS))
            for number, version in enumerate(real):
                run = f"real-{number}"
                honest.serve(make_head(version, run=run), version, run=run)
            for number, version in enumerate(real):
                await wait_head(url, f"real-{number}")
                assert await has_all(url, version, f"real-{number}")
            assert await _followed(url, MAX_STRANGE_RUNS + len(real))
        names = [name for _, below, files in os.walk(tmp_path) for name in (*below, *files)]
        assert sum(name.startswith("bogus") for name in names) <= MAX_STRANGE_RUNS
        assert not {"etc", "UPPER"}.intersection(names)


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("named", "good", "why"),
    [
        ((), True, None),
        ((RUN, "theirs"), True, "theirs"),
        ((RUN,), True, None),
        ((), False, "theirs"),
    ],
)
async def test_a_run_that_nobody_here_can_trust_counts_only_where_it_was_asked_for(
    tmp_path: Path, named: tuple[str, ...], good: bool, why: str | None
) -> None:
    """Whoever may publish to a parent can name runs there: relays below stay ready."""
    parent = ScriptedParent()
    theirs = make_version(1, run="theirs")
    parent.serve(make_head(theirs, run="theirs", key=9), theirs, run="theirs")
    if good:
        parent.serve(make_head(VERSION), VERSION)
    async with parent.running(), running(config(tmp_path, parent.url, runs=named)) as url:
        if good:
            await wait_head(url)
            assert await has_all(url, VERSION)
        if named != (RUN,):
            await eventually(lambda: _refused(url, "theirs"))
        answer = await http(url, "/readyz")
        if why is None:
            assert answer.status == 200
        else:
            assert answer.status == 503
            assert f"run {why}: no head yet".encode() in answer.body


async def _refused(url: str, run: str) -> bool:
    """Whether the head of a run was looked at, and is not served."""
    found = (await status_of(url))["runs"].get(run)
    return found is not None and found["head"] is None and "trusted" in str(found["problem"])


async def _followed(url: str, count: int) -> bool:
    return len((await status_of(url))["runs"]) == count
