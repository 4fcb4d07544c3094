"""A relay in its tree: heads, trust, depth, loops, siblings, prefetching, restarts, draining."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relay.config import Prefetch
from relay.following import ParentFeed
from relay.node import Node
from shardcast.demo.processes import free_ports
from shardcast.errors import UsageError
from shardcast.protocol.digest import digest_of
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise, publish
from tests.contract.relays import (
    QUICK,
    config,
    limits,
    path_of,
    running,
    status_of,
    wait_head,
    wait_ready,
)
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import PATIENCE_S, Wire, eventually, http

VERSION = make_version(1)


async def fetch_all(url: str, version: MadeVersion) -> None:
    for digest in version.documents[::-1] + version.shards:
        answer = await http(url, path_of(digest))
        assert (answer.status, digest_of(answer.body)) == (200, digest)


async def test_prefetches_the_newest_version_and_commits_it(tmp_path: Path) -> None:
    old, new = make_version(1), make_version(2)
    parent = ScriptedParent()
    parent.serve(make_head(old, new), old, new)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        assert parent.count(new.shards) == len(new.shards)
        assert parent.count(old.shards) == 0
        committed = tmp_path / "r" / RUN / "versions" / "000002"
        await eventually(committed.is_dir)
        for path, data in new.files.items():
            assert (committed / path).read_bytes() == data
        await fetch_all(url, old)  # on demand


async def test_unchanged_bytes_are_copied_and_not_fetched(tmp_path: Path) -> None:
    same = noise(2 * SHARD, 5)
    first = make_version(1, {"a": same, "b": noise(SHARD, 1)})
    second = make_version(2, {"a": noise(SHARD, 2) + same[SHARD:], "b": noise(SHARD, 1), "c": same})
    parent = ScriptedParent()
    parent.serve(make_head(first), first)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        before = parent.count(set(first.shards) | set(second.shards))
        parent.serve(make_head(first, second), second)
        await eventually(lambda: parent.count(second.ref.manifest))
        await wait_ready(url)
        await fetch_all(url, second)
        fetched = parent.count(set(first.shards) | set(second.shards)) - before
        assert fetched == 1  # the one new shard


async def test_ready_goes_by_the_version_to_run_after_a_withdrawal(tmp_path: Path) -> None:
    old, new = make_version(1), make_version(2)
    parent = ScriptedParent()
    parent.serve(make_head(old, new), old, new)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        assert (await status_of(url))["runs"][RUN]["complete"] == 2
        parent.serve(make_head(old, new, withdrawn=[2]))
        await eventually(lambda: parent.count(old.shards))
        await wait_ready(url)
        assert (await status_of(url))["runs"][RUN]["complete"] == 1


async def test_equal_shards_of_one_version_are_fetched_once(tmp_path: Path) -> None:
    version = make_version(1, {"a": bytes(4 * SHARD), "b": bytes(SHARD)})
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        assert parent.count(version.shards) == 1
        await eventually((tmp_path / "r" / RUN / "versions" / "000001").is_dir)


async def test_a_new_head_reaches_a_waiting_child_at_once(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION, sequence=10**12), VERSION)
    second = make_version(2)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_head(url)
        async with Wire(url) as wire:
            await wire.ask(f"/v1/{RUN}/head?after={10**12}&wait=25")
            await asyncio.sleep(0)
            newer = make_head(VERSION, second)
            parent.serve(newer, second)
            assert (await wire.answer()).body == newer  # within PATIENCE_S: before the wait is over


async def test_an_older_or_foreign_head_is_not_served(tmp_path: Path) -> None:
    good = make_head(VERSION, sequence=2 * 10**12 // 2)
    parent = ScriptedParent()
    parent.serve(good, VERSION)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_head(url)
        for bad in (
            make_head(VERSION, sequence=5),
            make_head(VERSION, key=2),
            make_head(VERSION, run="other"),
            b"{}",
        ):
            parent.serve(bad)
            parent.cut()  # so that the relay asks again now
            await asyncio.sleep(0.3)
            assert (await http(url, f"/v1/{RUN}/head")).body == good


async def test_an_expired_head_is_forwarded(tmp_path: Path) -> None:
    expired = make_head(VERSION, expires_in_ms=-(10**9))
    parent = ScriptedParent()
    parent.serve(expired, VERSION)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_head(url)
        assert (await http(url, f"/v1/{RUN}/head")).body == expired


async def test_what_was_seen_survives_a_restart(tmp_path: Path) -> None:
    parent = ScriptedParent()
    good = make_head(VERSION, sequence=10**12)
    parent.serve(good, VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
        asked = len(parent.asks)
        parent.serve(make_head(VERSION, sequence=10**11))
        async with running(settings) as url:
            assert (await http(url, f"/v1/{RUN}/head")).body == good
            await fetch_all(url, VERSION)
        assert len(parent.asks) == asked


async def test_parents_unreachable_serves_what_is_here(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
    async with running(settings) as url:
        await fetch_all(url, VERSION)
        child = config(tmp_path / "c", url)
        async with running(child) as below:  # also to a child that comes now
            await wait_ready(below)
            await fetch_all(below, VERSION)


async def test_restart_resumes_with_the_shards_that_were_verified(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    last = VERSION.shards[-1]
    pause = Pause(after=10)
    parent.script(last, pause)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings):
            await asyncio.wait_for(pause.reached.wait(), 10)
            await eventually(lambda: parent.count(VERSION.shards) == len(VERSION.shards))

            async def all_but_one() -> bool:
                stored = tmp_path / "r" / RUN / "state" / "000001.shards"
                return stored.exists() and stored.stat().st_size == 40 + 24 * (
                    len(VERSION.shards) - 1
                )

            await eventually(all_but_one)
        pause.go.set()
        before = parent.count(VERSION.shards)
        async with running(settings) as url:
            await wait_ready(url)
            await fetch_all(url, VERSION)
        assert parent.count(VERSION.shards) == before + 1


async def test_a_shard_damaged_on_disk_is_fetched_again(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url)
        async with running(settings) as url:
            await wait_ready(url)
        file = tmp_path / "r" / RUN / "versions" / "000001" / "model.safetensors"
        with file.open("r+b") as opened:
            opened.seek(SHARD + 1)
            opened.write(b"\0\0\0")
        delta = tmp_path / "r" / RUN / "blobs" / f"{VERSION.layout}.bin"
        assert delta.exists()
        async with running(settings) as url:
            await fetch_all(url, VERSION)


async def test_first_use_remembers_the_key(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    settings: dict[str, Any] = {"key": None, "first_use": True}
    async with parent.running():
        async with running(config(tmp_path / "r", parent.url, **settings)) as url:
            await wait_head(url)
        parent.serve(make_head(VERSION, key=2))
        plain = config(tmp_path / "r", parent.url, key=None)  # a remembered key is enough
        async with running(plain) as url:
            await wait_head(url)

            async def refused() -> bool:
                return "trusted" in str((await status_of(url))["runs"][RUN]["problem"])

            await eventually(refused)


async def test_without_any_key_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--pubkey"):
        async with running(config(tmp_path / "r", "http://127.0.0.1:9", key=None)):
            pass


async def test_named_runs_only(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    parent.serve(make_head(make_version(1, run="other"), run="other"), run="other")
    async with parent.running():
        async with running(config(tmp_path / "r", parent.url, runs=(RUN,))) as url:
            await wait_ready(url)
            assert json.loads((await http(url, "/v1/runs")).body)["runs"] == [RUN]
        async with running(config(tmp_path / "all", parent.url)) as url:
            await wait_head(url, "other")
            await wait_head(url)


# --- depth and loops ----------------------------------------------------------------------------


async def test_depth_is_the_smallest_live_parents_plus_one(tmp_path: Path) -> None:
    near, far = ScriptedParent(extra={"Shardcast-Depth": "3"}), ScriptedParent()
    far.extra = {"Shardcast-Depth": "7"}
    for parent in (near, far):
        parent.serve(make_head(VERSION, sequence=10**12), VERSION)
    async with (
        near.running(),
        far.running(),
        running(config(tmp_path / "r", near.url, far.url)) as url,
    ):
        await wait_ready(url)

        async def depth(wanted: str) -> bool:
            return (await http(url, "/healthz"))["Shardcast-Depth"] == wanted

        await eventually(lambda: depth("4"))
        assert far.count(VERSION.shards) == 0  # it is deeper: a last resort only
        near.alive = False
        near.cut()
        await eventually(lambda: depth("8"))


async def test_children_that_wait_for_a_head_hear_of_a_new_depth_at_once(tmp_path: Path) -> None:
    near, far = ScriptedParent(), ScriptedParent(extra={"Shardcast-Depth": "7"})
    envelope = make_head(VERSION)
    for parent in (near, far):
        parent.serve(envelope, VERSION)

    async def depth(url: str, wanted: str) -> bool:
        return (await http(url, "/healthz"))["Shardcast-Depth"] == wanted

    async with (
        near.running(),
        far.running(),
        running(config(tmp_path / "p", near.url, far.url)) as parent_url,
        running(config(tmp_path / "c", parent_url)) as child_url,
    ):
        await eventually(lambda: depth(child_url, "2"))
        await wait_ready(child_url)
        async with Wire(parent_url) as worker:
            sequence = 10**15
            await worker.ask(f"/v1/{RUN}/head?after={sequence}&wait=3")
            near.alive = False
            near.cut()
            await eventually(lambda: depth(child_url, "9"))  # long before a long poll ends
            answer = await worker.answer()  # workers do not care: theirs went on
            assert answer["Shardcast-Depth"] == "8"


async def test_a_depth_that_changed_between_two_long_polls_is_told_too(tmp_path: Path) -> None:
    near, far = ScriptedParent(), ScriptedParent(extra={"Shardcast-Depth": "7"})
    envelope = make_head(VERSION)
    for parent in (near, far):
        parent.serve(envelope, VERSION)
    head, me = f"/v1/{RUN}/head", {"Shardcast-Node": "ab" * 16}

    async def depth(url: str, wanted: str) -> bool:
        return (await http(url, "/healthz"))["Shardcast-Depth"] == wanted

    async with (
        near.running(),
        far.running(),
        running(config(tmp_path / "p", near.url, far.url)) as url,
    ):
        await eventually(lambda: depth(url, "1"))
        await wait_head(url)
        assert (await http(url, head, headers=me))["Shardcast-Depth"] == "1"
        near.alive = False
        near.cut()
        await eventually(lambda: depth(url, "8"))
        # Within PATIENCE_S: before the wait is over.
        answer = await http(url, f"{head}?after={10**15}&wait=25", headers=me)
        assert answer["Shardcast-Depth"] == "8"


async def test_a_parent_at_the_deepest_level_is_not_taken(tmp_path: Path) -> None:
    parent = ScriptedParent(extra={"Shardcast-Depth": "16"})
    parent.serve(make_head(VERSION), VERSION)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_head(url)
        assert (await http(url, "/healthz"))["Shardcast-Depth"] == "16"
        assert (await status_of(url))["parents"][0]["used"] is False


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_ring_of_parents_ends_in_errors_and_not_in_a_hang(
    tmp_path: Path, size: int
) -> None:
    """Relays that are each other's parents know a version's head, and none has its shards."""
    origin = ScriptedParent()
    origin.serve(make_head(VERSION), VERSION)
    ports = free_ports(size)
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def ring(number: int, *more: str) -> Any:
        return config(
            tmp_path / str(number),
            *more,
            urls[(number + 1) % size],
            listen=f"127.0.0.1:{ports[number]}",
            prefetch=Prefetch.DEMAND,
        )

    async with origin.running():
        for number in range(size):  # each learns the head and the documents once
            async with running(ring(number, origin.url)) as url:
                await wait_head(url)
                for digest in VERSION.documents[::-1]:
                    assert (await http(url, path_of(digest))).status == 200
    stack = [running(ring(number)) for number in range(size)]
    opened = [await relay.__aenter__() for relay in stack]
    try:
        for round_number in range(2):  # each answer within PATIENCE_S
            answers = await asyncio.gather(
                *(http(url, path_of(VERSION.shards[round_number])) for url in opened)
            )
            assert {answer.status for answer in answers} == {503}
    finally:
        for relay in stack:
            await relay.__aexit__(None, None, None)


# --- siblings -----------------------------------------------------------------------------------


async def _siblings(
    tmp_path: Path, parent: ScriptedParent, count: int, **options: Any
) -> tuple[list[Any], list[str]]:
    ports = free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    relays = [
        running(
            config(
                tmp_path / str(number),
                parent.url,
                siblings=tuple(urls),  # its own URL too, as a shared list would have it
                listen=f"127.0.0.1:{port}",
                **options,
            )
        )
        for number, port in enumerate(ports)
    ]
    await asyncio.gather(*(relay.__aenter__() for relay in relays))
    return relays, urls


async def _leave(relays: Sequence[Any]) -> None:
    for relay in relays:
        await relay.__aexit__(None, None, None)


async def test_the_parent_sends_each_shard_once_to_siblings_together(tmp_path: Path) -> None:
    version = make_version(1, {"model": noise(24 * SHARD)})
    parent = ScriptedParent()
    async with parent.running():
        relays, urls = await _siblings(tmp_path, parent, 2)
        try:
            await eventually(lambda: _all_live(urls, 2))
            parent.serve(make_head(version), version)
            for url in urls:
                await wait_ready(url)
            assert parent.count(version.shards) <= len(version.shards) + 2
            for url in urls:
                await fetch_all(url, version)
        finally:
            await _leave(relays)


async def _all_live(urls: Sequence[str], count: int) -> bool:
    for url in urls:
        found = (await status_of(url))["siblings"]
        if sum(sibling["live"] for sibling in found) != count:
            return False
    return True


async def test_a_dead_sibling_means_the_parent_is_asked(tmp_path: Path) -> None:
    version = make_version(1, {"model": noise(12 * SHARD)})
    parent = ScriptedParent()
    async with parent.running():
        relays, urls = await _siblings(tmp_path, parent, 2)
        try:
            await eventually(lambda: _all_live(urls, 2))
            await relays[1].__aexit__(None, None, None)
            parent.serve(make_head(version), version)
            await wait_ready(urls[0])
            assert parent.count(version.shards) == len(version.shards)
        finally:
            await _leave(relays[:1])


async def test_a_request_of_a_sibling_is_never_passed_to_a_sibling(tmp_path: Path) -> None:
    version = make_version(1, {"model": noise(12 * SHARD)})
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    async with parent.running():
        relays, urls = await _siblings(tmp_path, parent, 2, prefetch=Prefetch.DEMAND)
        try:
            await eventually(lambda: _all_live(urls, 2))
            await wait_head(urls[0])
            for digest in version.documents[::-1]:
                for url in urls:
                    assert (await http(url, path_of(digest))).status == 200
            header = {"Shardcast-Sibling": "ab" * 16}
            for digest in version.shards:
                statuses = [(await http(u, path_of(digest), headers=header)).status for u in urls]
                assert sorted(statuses) == [200, 503], digest  # its owner alone fetches it
            assert parent.count(version.shards) == len(version.shards)
        finally:
            await _leave(relays)


async def test_siblings_never_wait_for_each_others_threads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both have as much to fetch from the other as they have threads, and more."""
    version = make_version(1, {"model": noise(48 * SHARD)})
    parent = ScriptedParent()
    parent.serve(make_head(version), version)
    async with parent.running():
        relays, urls = await _siblings(
            tmp_path, parent, 2, prefetch=Prefetch.DEMAND, limits=limits(fill_threads=2)
        )
        try:
            await eventually(lambda: _all_live(urls, 2))
            for url in urls:
                await wait_head(url)
                for digest in version.documents[::-1]:
                    assert (await http(url, path_of(digest))).status == 200
            async with asyncio.timeout(PATIENCE_S):
                orders = (version.shards, version.shards[::-1])
                answers = await asyncio.gather(
                    *(
                        http(url, path_of(digest))
                        for url, digests in zip(urls, orders, strict=True)
                        for digest in digests
                    )
                )
            assert {answer.status for answer in answers} == {200}
            assert parent.count(version.shards) == len(version.shards)
            assert "too slow or silent" not in caplog.text  # nobody lost patience with the other
        finally:
            await _leave(relays)


async def test_siblings_that_hear_of_a_run_at_different_moments_share_it(tmp_path: Path) -> None:
    version = make_version(1, {"model": noise(24 * SHARD)}, run="fresh")
    parent = ScriptedParent()
    slow = replace(QUICK, head_poll_s=60.0)  # only what a sibling asks for makes it look
    async with parent.running():
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        relays = [
            running(
                config(
                    tmp_path / url[-5:], parent.url, siblings=tuple(urls), listen=url[7:], net=net
                )
            )
            for url, net in zip(urls, (QUICK, slow), strict=True)
        ]
        for relay in relays:
            await relay.__aenter__()
        try:
            await eventually(lambda: _all_live(urls, 2))
            parent.serve(make_head(version, run="fresh"), version, run="fresh")
            for url in urls:
                await wait_ready(url)
            assert parent.count(version.shards) == len(version.shards)
        finally:
            await _leave(relays)


# --- life ---------------------------------------------------------------------------------------


async def test_draining_lets_a_running_response_finish(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    digest = VERSION.shards[0]
    pause = Pause(after=100_000)
    async with parent.running():
        settings = config(tmp_path / "r", parent.url, prefetch=Prefetch.DEMAND)
        relay = running(settings)
        url = await relay.__aenter__()
        await wait_head(url)
        for document in VERSION.documents[::-1]:
            await http(url, path_of(document))
        parent.script(digest, pause)
        async with Wire(url) as busy, Wire(url) as idle, Wire(url) as waiting:
            await idle.ask("/healthz")
            await idle.answer()
            head = (await http(url, f"/v1/{RUN}/head")).body
            await waiting.ask(f"/v1/{RUN}/head?after={10**15}&wait=25")
            await busy.ask(path_of(digest))
            await busy.head()
            got = await busy.exactly(100_000)
            leaving = asyncio.create_task(relay.__aexit__(None, None, None))
            assert (await waiting.answer()).body == head  # woken, not left hanging
            assert await idle.rest() == b""
            with pytest.raises(ConnectionRefusedError):
                await http(url, "/healthz")
            pause.go.set()
            got += await busy.exactly(SHARD - 100_000)
            assert got == VERSION.blobs[digest]
            await asyncio.wait_for(leaving, 10)


async def test_connections_over_the_limit_are_refused_politely(tmp_path: Path) -> None:
    settings = config(tmp_path / "r", limits=limits(max_connections_per_client=2))
    async with running(settings) as url:
        async with Wire(url) as first, Wire(url) as second:
            await first.ask("/healthz")
            await second.ask("/healthz")
            assert [(await w.answer()).status for w in (first, second)] == [200, 200]
            refused = await http(url, "/healthz")
            assert refused.status == 503
            assert int(refused["Retry-After"]) > 0
            async with Wire(url, source="127.0.0.2") as other:
                await other.ask("/healthz")
                assert (await other.answer()).status == 200
        await eventually(lambda: _ok(url))


async def _ok(url: str) -> bool:
    return (await http(url, "/healthz")).status == 200


async def test_half_a_request_is_dropped_in_time(tmp_path: Path) -> None:
    settings = config(tmp_path / "r", limits=limits(header_timeout_s=0.2))
    async with running(settings) as url, Wire(url) as wire:
        await wire.send(b"GET /healthz HTTP/1.1\r\nHost")
        assert await wire.rest() == b""


async def test_the_rate_limit_holds(tmp_path: Path) -> None:
    data = noise(4 * SHARD)
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", {"a": data})
    version = make_version(1, {"a": data})
    async with running(config(tmp_path / "s", limit_rate_bytes_per_s=2 << 20)) as url:
        await wait_head(url)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(http(url, path_of(digest)) for digest in version.shards))
        assert loop.time() - started > 0.35


async def test_versions_beyond_keep_leave_the_disk_but_not_under_a_reader(tmp_path: Path) -> None:
    versions = [make_version(n) for n in (1, 2, 3)]
    parent = ScriptedParent()
    async with parent.running():
        quick = config(tmp_path / "r", parent.url, keep=1, limits=limits(recent_s=0.0))
        async with running(quick) as url:
            for number in (1, 2, 3):
                parent.serve(make_head(*versions[:number]), *versions[:number])

                async def whole(number: int = number) -> bool:
                    runs = (await status_of(url))["runs"]
                    return bool(runs) and runs[RUN].get("complete") == number

                await eventually(whole)
            directory = tmp_path / "r" / RUN / "versions"

            def only_the_newest() -> bool:
                return sorted(path.name for path in directory.iterdir()) == ["000003"]

            await eventually(only_the_newest)
            assert (await http(url, path_of(versions[2].shards[0]))).status == 200


async def test_who_asks_while_nobody_is_followed_is_told_404(tmp_path: Path) -> None:
    """The feed stands still for a moment while another relay takes over."""
    settings = config(tmp_path / "r", "http://127.0.0.1:9")
    store = Store(settings.store)
    node = Node(settings, store, "ab" * 16, asyncio.get_running_loop())
    node.feed = feed = ParentFeed(node)
    following = asyncio.create_task(feed.run())
    await eventually(lambda: bool(feed._upstreams))
    await feed.discover("another")  # looks for it, and finds nothing
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await feed.discover("another")
    assert node.sources is not None
    node.sources.close()
    node.fills.close()
    store.close()
