"""Siblings that both rebuild (``--materialize`` with ``--sibling``): what leaves the origin, who is served.

A delta blob has one owner among siblings, as every blob has: the others take it from there. Each
rebuilds all shards itself, and what cannot be rebuilt is split as everything else is.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from relay.siblings import owner_of
from tests.contract.deltas import changed, delta_blobs, with_delta
from tests.contract.made import SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import limits, path_of, status_of, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import eventually, http
from tests.faults.trees import Node, count_of, has_all, pulled, tree

SHARDS = 24
BASE = make_version(1, {"model": noise(SHARDS * SHARD, 1)})
NEW = make_version(2, {"model": changed(BASE.files["model"], 2)})
OTHER = make_version(2, {"model": changed(BASE.files["model"], 77)})
EACH = [range(shard, shard + 2) for shard in range(0, SHARDS, 2)]
DELTA = with_delta(NEW, BASE, runs=EACH)
LYING = with_delta(NEW, BASE, runs=EACH, like=OTHER)
NEWS = 2
"""Siblings hear of a version at different moments: so many blobs may be asked for twice."""


@contextlib.asynccontextmanager
async def siblings(
    root: Path, parent: ScriptedParent, **options: Any
) -> AsyncIterator[tuple[str, str]]:
    """Two siblings below a parent, which see each other."""
    pair = [Node(name, [parent.url], [other]) for name, other in (("a", "b"), ("b", "a"))]
    async with tree(root, *pair, materialize=True, **options) as urls:
        await eventually(lambda: see_each_other(urls.values()), what="the siblings are live")
        yield urls["a"], urls["b"]


async def see_each_other(urls: Any) -> bool:
    found = [(await status_of(url))["siblings"] for url in urls]
    return all(sibling["live"] for known in found for sibling in known)


async def have(urls: Sequence[str], version: int) -> None:
    """Waits until a version is whole at all of them."""
    await each(urls, lambda run: run.get("complete"), version)


async def heard_of(urls: Sequence[str], version: int) -> None:
    """Waits until all of them announce a version."""
    await each(urls, lambda run: run["head"] and run["head"]["version"], version)


async def each(urls: Sequence[str], says: Callable[[dict[str, Any]], object], what: int) -> None:
    for url in urls:

        async def said(url: str = url) -> bool:
            runs = (await status_of(url))["runs"].values()
            return [says(run) for run in runs] == [what]

        await eventually(said, what=f"version {what} at {url}")


async def rebuilt(urls: Sequence[str]) -> list[float]:
    return [await count_of(url, "shardcast_materialized_shards_total") for url in urls]


async def serve_cold_workers(tmp_path: Path, urls: Sequence[str], version: MadeVersion) -> None:
    """Each relay alone has everything, and so have both together."""
    for number, sources in enumerate(([urls[0]], [urls[1]], urls)):
        await pulled(tmp_path / f"out-{number}", version, *sources)


async def test_siblings_rebuild_each_for_itself_from_blobs_that_left_the_origin_once(
    tmp_path: Path,
) -> None:
    parent = ScriptedParent()
    async with parent.running(), siblings(tmp_path, parent) as urls:
        parent.serve(make_head(BASE), BASE)
        await have(urls, 1)
        assert parent.count(BASE.shards) <= SHARDS + NEWS
        parent.serve(make_head(BASE, DELTA), DELTA)
        await heard_of(urls, 2)
        await serve_cold_workers(tmp_path, urls, NEW)  # while they rebuild
        await have(urls, 2)
        assert parent.count(NEW.shards) == 0
        assert parent.count(delta_blobs(DELTA)) <= len(EACH) + NEWS
        assert await rebuilt(urls) == [SHARDS, SHARDS]


async def test_a_delta_that_is_of_no_use_costs_the_origin_one_copy(tmp_path: Path) -> None:
    parent = ScriptedParent()
    async with parent.running(), siblings(tmp_path, parent) as urls:
        parent.serve(make_head(BASE), BASE)
        await have(urls, 1)
        last = Pause(after=10)
        parent.script(delta_blobs(LYING)[-1], last)
        parent.serve(make_head(BASE, LYING), LYING)

        async def rest_is_tried() -> bool:
            name = "shardcast_materialize_failures_total"
            return [await count_of(url, name) for url in urls] == [len(EACH) - 1] * 2

        await eventually(rest_is_tried, what="all frames but the last turned out wrong")
        last.go.set()
        await have(urls, 2)
        await serve_cold_workers(tmp_path, urls, NEW)
        assert await rebuilt(urls) == [0, 0]
        # One of the two may still hope for the last frame when the other asks for its shards.
        assert SHARDS <= parent.count(NEW.shards) <= SHARDS + len(EACH[-1])


async def test_a_sibling_without_a_base_takes_from_the_other_what_that_one_owns(
    tmp_path: Path,
) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(BASE), BASE)
    async with parent.running():
        async with tree(tmp_path, Node("a", [parent.url]), materialize=True) as alone:
            await wait_ready(alone["a"])
        parent.serve(make_head(BASE, DELTA), DELTA)
        async with siblings(
            tmp_path, parent
        ) as urls:  # b begins with nothing, and no older version
            await have(urls, 2)
            assert await rebuilt(urls) == [SHARDS, 0]
            await serve_cold_workers(tmp_path, urls, NEW)
            nodes = [(await status_of(url))["node"] for url in urls]
            owned = [digest for digest in NEW.shards if owner_of(digest, nodes) == nodes[1]]
            assert set(NEW.shards) != set(owned) != set()
            asked = {ask.digest for ask in parent.asks} & set(NEW.shards)
            assert asked >= set(owned)
            assert parent.count(NEW.shards) <= SHARDS  # at most the copy that b needs


async def test_a_delta_blob_that_does_not_come_on_holds_up_neither(tmp_path: Path) -> None:
    """Its owner waits for the parent, the other one for its owner: both turn to plain shards."""
    parent = ScriptedParent()
    short = limits(rebuild_patience_s=0.5)
    async with parent.running(), siblings(tmp_path, parent, limits=short) as urls:
        parent.serve(make_head(BASE), BASE)
        await have(urls, 1)
        stuck = delta_blobs(DELTA)[5]
        pauses = [Pause(after=10) for _ in range(4)]
        parent.script(stuck, *pauses)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await asyncio.wait_for(pauses[0].reached.wait(), 20)
        lacking = [NEW.shards[shard] for shard in EACH[5]]
        for url in urls:

            async def given(url: str = url) -> bool:
                answers = [await http(url, path_of(digest)) for digest in lacking]
                return {answer.status for answer in answers} == {200}

            await eventually(given, what=f"plain shards at {url}")
        assert parent.count(lacking) <= 2 * len(lacking)
        for pause in pauses:
            pause.go.set()
        await have(urls, 2)
        assert all([await has_all(url, NEW) for url in urls])
        assert parent.count(set(NEW.shards) - set(lacking)) == 0
