"""Trees that are none: rings, relays that name themselves, siblings that disagree.

Every request ends within its deadline, and every worker gets its version once any way to an origin
exists.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relay.config import Prefetch
from shardcast.demo.processes import free_ports
from tests.contract.made import SHARD, make_head, make_version, noise
from tests.contract.relays import path_of, status_of, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import eventually, http
from tests.faults.trees import Node, count_of, depth_of, get, has_all, pulled, statuses, tree

pytestmark = pytest.mark.fault(17)

VERSION = make_version(1, {"model": noise(12 * SHARD)})


def ring(size: int, origin: str) -> list[Node]:
    """Relays that name the next one as parent; the first one names an origin as well."""
    names = [f"r{number}" for number in range(size)]
    nodes = [Node(name, [names[(i + 1) % size]]) for i, name in enumerate(names)]
    nodes[0] = Node("r0", [*nodes[0].parents, origin])
    return nodes


async def settled(urls: dict[str, str], wanted: list[int]) -> None:
    """Wait until the relays stand so deep, in their order."""

    async def check() -> bool:
        return [await depth_of(url) for url in urls.values()] == wanted

    await eventually(check, what=f"depths {wanted}")


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_workers_of_a_ring_get_their_version_once_an_origin_appears(
    tmp_path: Path, size: int
) -> None:
    (port,) = free_ports(1)
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    async with tree(tmp_path, *ring(size, f"http://127.0.0.1:{port}")) as urls:
        # Nobody knows anything: everyone is told so, at once.
        async with asyncio.timeout(20):
            for url in urls.values():
                assert (await http(url, "/v1/policy/head")).status == 404
                assert (await get(url, VERSION.shards[0])).status == 404
        workers = [
            asyncio.create_task(pulled(tmp_path / f"worker-{name}", VERSION, url))
            for name, url in urls.items()
        ]
        async with origin.running(port):
            await asyncio.gather(*workers)
            # r0 has the origin, the last one has r0, and so on down to r1.
            await settled(urls, [1, *range(size, 1, -1)])
            assert origin.count(VERSION.shards) == len(VERSION.shards)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_ring_that_lost_its_origin_says_so_and_heals(tmp_path: Path, size: int) -> None:
    """The depths do not count up: each relay sees itself on the way its parent tells."""
    (port,) = free_ports(1)
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    nodes = ring(size, f"http://127.0.0.1:{port}")
    async with tree(tmp_path, *nodes, prefetch=Prefetch.DEMAND) as urls:
        stood = [1, *range(size, 1, -1)]
        async with origin.running(port):
            for url in urls.values():
                await wait_head(url)
                assert (await get(url, VERSION.shards[0])).status == 200
            await settled(urls, stood)
        seen: list[set[int]] = [set() for _ in urls]

        async def lost() -> bool:
            depths = [await depth_of(url) for url in urls.values()]
            for found, depth in zip(seen, depths, strict=True):
                found.add(depth)
            return set(depths) == {16}

        await eventually(lost)
        assert all(found <= {before, 16} for found, before in zip(seen, stood, strict=True))
        for url in urls.values():
            parents = (await status_of(url))["parents"]
            assert not any(parent["used"] for parent in parents)
        # What nobody has: a clear answer, from all at once, and no storm between them.
        before = [
            await count_of(url, "shardcast_requests_total", endpoint="blobs")
            for url in urls.values()
        ]
        for url in urls.values():
            assert set(await statuses(url, VERSION.shards[1:3])) == {503}
        after = [
            await count_of(url, "shardcast_requests_total", endpoint="blobs")
            for url in urls.values()
        ]
        assert sum(after) - sum(before) <= 2 * size + 2 * size * 6
        for url in urls.values():  # and what is here is served
            assert (await get(url, VERSION.shards[0])).status == 200
        async with origin.running(port):
            await settled(urls, stood)
            for url in urls.values():
                assert await has_all(url, VERSION)


async def test_two_parents_of_each_other_whose_origin_dies_within_a_blob(tmp_path: Path) -> None:
    """Both were at depth 1; each may think that the other one still leads somewhere."""
    (port,) = free_ports(1)
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    wanted = VERSION.shards[:4]
    pauses = {digest: [Pause(after=100_000, abort=True) for _ in range(2)] for digest in wanted}
    home = f"http://127.0.0.1:{port}"
    nodes = Node("a", [home, "b"]), Node("b", [home, "a"])
    async with tree(tmp_path, *nodes, prefetch=Prefetch.DEMAND) as urls:
        async with origin.running(port):
            for url in urls.values():
                await wait_head(url)
                for digest in VERSION.documents[::-1]:
                    assert (await get(url, digest)).status == 200
            await settled(urls, [1, 1])
            for digest in wanted:
                origin.script(digest, *pauses[digest])
            readers = [
                asyncio.create_task(statuses(url, order))
                for url, order in zip(urls.values(), (wanted, wanted[::-1]), strict=True)
            ]
            await eventually(lambda: origin.count(wanted) == 8)
            for pause in (p for pair in pauses.values() for p in pair):
                pause.go.set()
        for found in await asyncio.gather(*readers):
            assert set(found) <= {0, 503}
        await settled(urls, [16, 16])
        origin.scripts.clear()
        async with origin.running(port):
            await settled(urls, [1, 1])
            for url in urls.values():
                assert await has_all(url, VERSION)


@pytest.mark.parametrize(
    "lists",
    [
        {"a": "bc", "b": "a", "c": ""},  # nobody agrees with anybody
        {"a": "b", "b": "c", "c": "a"},  # each knows another one
        {"a": "abc", "b": "abc", "c": "abc"},
        {"a": "bc", "b": "", "c": ""},
    ],
    ids=["asymmetric", "ring", "all", "one-sided"],
)
@pytest.mark.parametrize("prefetch", [Prefetch.ALL, Prefetch.DEMAND])
async def test_siblings_that_disagree_about_owners(
    tmp_path: Path, lists: dict[str, str], prefetch: Prefetch
) -> None:
    origin = ScriptedParent()
    async with origin.running():
        nodes = [Node(name, [origin.url], list(known)) for name, known in lists.items()]
        async with tree(tmp_path, *nodes, prefetch=prefetch) as urls:
            for name, url in urls.items():
                known = len(lists[name])

                async def live(url: str = url, known: int = known) -> bool:
                    found = (await status_of(url))["siblings"]
                    return bool(sum(sibling["live"] for sibling in found) == known)

                await eventually(live)
            origin.serve(make_head(VERSION), VERSION)
            for url in urls.values():
                await wait_head(url)
            await asyncio.gather(
                *(pulled(tmp_path / f"w{name}", VERSION, url) for name, url in urls.items())
            )
            for url in urls.values():
                assert await has_all(url, VERSION)
            # At worst as without siblings: nobody asks for a blob twice.
            assert max(origin.count(digest) for digest in VERSION.shards) <= len(urls)


async def test_a_parent_that_is_a_sibling_too(tmp_path: Path) -> None:
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    async with origin.running():
        nodes = (
            Node("a", [origin.url], ["a", "b"]),
            Node("b", [origin.url, "a"], ["a", origin.url]),
            Node("c", ["a", "b", "c"], ["a", "b", "c"]),
        )
        async with tree(tmp_path, *nodes) as urls:
            await settled(urls, [1, 1, 2])
            await asyncio.gather(
                *(pulled(tmp_path / f"w{name}", VERSION, url) for name, url in urls.items())
            )
            for url in urls.values():
                await wait_ready(url)
            assert origin.count(VERSION.shards) <= 2 * len(VERSION.shards)


async def test_relays_of_one_cloned_disk_image_have_one_node_id(tmp_path: Path) -> None:
    """Each takes the other for itself: they do not help each other, and that is all."""
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / ".node-id").write_text("ab" * 16 + "\n")
    async with origin.running():
        nodes = Node("a", [origin.url], ["b"]), Node("b", [origin.url], ["a"])
        async with tree(tmp_path, *nodes) as urls:
            for url in urls.values():
                await wait_ready(url)
                assert await has_all(url, VERSION)
            assert origin.count(VERSION.shards) <= 2 * len(VERSION.shards)


async def test_a_marked_request_is_never_passed_on_by_a_ring(tmp_path: Path) -> None:
    """A relay without a way to the origin answers a neighbour from disk, or at once with 503."""
    async with tree(tmp_path, Node("a", ["b"]), Node("b", ["a"])) as urls:
        mark = {"Shardcast-Sibling": "cd" * 16}
        answer = await http(urls["a"], path_of(VERSION.shards[0]), headers=mark)
        assert answer.status in (404, 503)
