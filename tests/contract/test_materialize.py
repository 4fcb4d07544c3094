"""A relay that rebuilds full shards from its base and a delta, instead of fetching them."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relay.config import Prefetch, RelayConfig
from shardcast.errors import UsageError
from shardcast.protocol.delta import DeltaBlob, DeltaPart, encode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenDeltaRef, OpenRef
from shardcast.store.store import Store
from tests.contract.deltas import changed, delta_blobs, with_delta
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import config, limits, running, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent, refuses, sends
from tests.contract.wire_client import eventually, http

BASE = make_version(1, {"model.safetensors": noise(4 * SHARD + 99, 1), "extra": noise(5000, 2)})
FIRST, LAST = range(2), range(2, 6)


def next_version(before: MadeVersion, number: int) -> MadeVersion:
    """A version with a few other bytes, without a delta."""
    files = {path: changed(data, number) for path, data in before.files.items()}
    return make_version(number, files)


NEW = next_version(BASE, 2)
DELTA = with_delta(NEW, BASE, runs=[FIRST, LAST])
LYING = with_delta(NEW, BASE, runs=[FIRST, LAST], like=next_version(BASE, 77))
"""Signed, well-formed, and wrong: its frames give other bytes than the version's."""


def path_of(digest: str) -> str:
    return f"/v1/{RUN}/blobs/{digest}.bin"


def settings(store: Path, *parents: str, **options: Any) -> RelayConfig:
    return config(store, *parents, materialize=True, **options)


async def status_of(url: str) -> Any:
    return json.loads((await http(url, "/v1/status")).body)


async def metric(url: str, line: str) -> float:
    text = (await http(url, "/metrics")).body.decode()
    return sum(float(s.split()[-1]) for s in text.splitlines() if s.startswith(line))


async def gets(url: str, version: MadeVersion) -> None:
    for digest in version.shards:
        answer = await http(url, path_of(digest))
        assert (answer.status, digest_of(answer.body)) == (200, digest)


@contextlib.asynccontextmanager
async def holding(
    tmp_path: Path, *versions: MadeVersion, **options: Any
) -> AsyncIterator[tuple[ScriptedParent, str]]:
    """A parent, and a relay below it that has its newest version whole."""
    parent = ScriptedParent()
    parent.serve(make_head(*versions), *versions)
    async with parent.running(), running(settings(tmp_path / "r", parent.url, **options)) as url:
        if options.get("prefetch", Prefetch.ALL) is Prefetch.ALL:
            await wait_ready(url)
        yield parent, url


async def settled(url: str, version: int) -> None:
    """Waits until a version is whole there."""

    async def check() -> bool:
        return bool((await status_of(url))["runs"][RUN]["complete"] == version)

    await eventually(check, what=f"version {version} is whole")


# --- the way it should go ---------------------------------------------------------------------


async def test_a_version_is_rebuilt_from_the_one_before_and_no_full_shard_is_fetched(
    tmp_path: Path,
) -> None:
    async with holding(tmp_path, BASE) as (parent, url):
        parent.sent = 0
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        assert parent.count(NEW.shards) == 0
        assert parent.count(delta_blobs(DELTA)) == 2
        assert parent.sent < NEW.ref.bytes / 20
        committed = tmp_path / "r" / RUN / "versions" / "000002"
        await eventually(committed.is_dir)
        for path, data in NEW.files.items():
            assert (committed / path).read_bytes() == data
        await gets(url, DELTA)
        assert await metric(url, "shardcast_materialized_shards_total") == 6
        assert await metric(url, "shardcast_materialized_bytes_total") == NEW.ref.bytes
        report = (await status_of(url))["materialize"]
        assert report == {"shards": 6, "bytes": NEW.ref.bytes, "failures": 0, "awaited": []}


async def test_without_the_option_it_is_fetched_after_the_delta(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(BASE), BASE)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        asked = [ask.digest for ask in parent.asks]
        blobs = [asked.index(digest) for digest in delta_blobs(DELTA)]
        shards = [asked.index(digest) for digest in NEW.shards]
        assert max(blobs) < min(shards)
        assert (await status_of(url))["materialize"] is None


async def test_until_it_is_rebuilt_a_shard_is_answered_503_and_not_fetched(tmp_path: Path) -> None:
    async with holding(tmp_path, BASE) as (parent, url):
        pause = Pause(after=10)
        parent.script(delta_blobs(DELTA)[1], pause)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await asyncio.wait_for(pause.reached.wait(), 20)

        async def first_is_here() -> bool:
            return (await http(url, path_of(NEW.shards[0]))).status == 200

        await eventually(first_is_here)
        assert (await status_of(url))["materialize"]["awaited"] == [{"run": RUN, "version": 2}]
        for digest in NEW.shards[2:]:
            answer = await http(url, path_of(digest))
            assert (answer.status, answer["Retry-After"]) == (503, "1")
        pause.go.set()
        await settled(url, 2)
        await gets(url, DELTA)
        assert parent.count(NEW.shards) == 0


async def test_what_the_delta_leaves_out_is_copied_or_fetched(tmp_path: Path) -> None:
    files = {**NEW.files, "same": BASE.files["model.safetensors"][:SHARD], "other": noise(9000, 9)}
    plain = make_version(2, files)
    names = {path: n for n, path in enumerate(files)}
    assert names["model.safetensors"] == 0
    grown = with_delta(plain, BASE, runs=[range(1, 5)])
    async with holding(tmp_path, BASE) as (parent, url):
        parent.asks.clear()
        parent.serve(make_head(BASE, grown), grown)
        await settled(url, 2)
        fetched = {ask.digest for ask in parent.asks} & set(plain.shards)
        assert fetched == {plain.shards[0], plain.shards[5], plain.shards[7]}
        await gets(url, grown)


async def test_versions_that_came_meanwhile_are_rebuilt_one_after_the_other(
    tmp_path: Path,
) -> None:
    versions = [BASE]
    for number in range(2, 6):
        versions.append(with_delta(next_version(versions[-1], number), versions[-1]))
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(*versions), *versions)
        await settled(url, 5)
        for version in versions[1:]:
            assert parent.count(version.shards) == 0
            await gets(url, version)


async def test_a_shorter_way_is_taken_where_there_is_one(tmp_path: Path) -> None:
    between = with_delta(next_version(BASE, 2), BASE)
    last = next_version(BASE, 3)  # half as far from version 1 as from version 2
    both = with_delta(with_delta(last, between), BASE)
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, between, both), between, both)
        await settled(url, 3)
        assert parent.count(last.shards) == parent.count(between.shards) == 0
        assert parent.count(delta_blobs(between)) == 0


async def test_a_compressed_copy_is_enough_for_a_relay_that_has_nothing(tmp_path: Path) -> None:
    plain = make_version(1, {"model.safetensors": bytes(range(64)) * (4 * SHARD // 64)})
    packed = with_delta(plain, None)
    async with holding(tmp_path, packed) as (parent, url):
        await settled(url, 1)
        assert parent.count(plain.shards) == 0
        await gets(url, packed)


async def test_an_open_version_is_rebuilt_as_its_parts_come(tmp_path: Path) -> None:
    delta = DELTA.ref.deltas[0]

    def opened(*parts: str, deltas: int) -> OpenRef:
        told = OpenDeltaRef(base=delta.base, base_version=1, parts=delta.parts[:deltas])
        return OpenRef(
            version=2, step=NEW.ref.step, layout=NEW.layout, parts=list(parts), deltas=[told]
        )

    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, opened=opened(deltas=0)), DELTA)
        await eventually(lambda: parent.count(NEW.layout))
        parent.serve(make_head(BASE, opened=opened(*NEW.parts, deltas=1)))

        async def two_are_here() -> bool:
            versions = (await status_of(url))["runs"][RUN]["versions"]
            return any(v["version"] == 2 and v["present"] == 2 for v in versions)

        await eventually(two_are_here)
        assert (await http(url, path_of(NEW.shards[2]))).status == 503
        parent.serve(make_head(BASE, DELTA))
        await settled(url, 2)
        assert parent.count(NEW.shards) == 0


async def test_down_a_tree_relays_rebuild_or_fill_from_their_parent(tmp_path: Path) -> None:
    async with holding(tmp_path, BASE) as (parent, upper):
        lower = settings(tmp_path / "lower", upper)
        plain = config(tmp_path / "plain", upper)
        async with running(lower) as second, running(plain) as third:
            for url in (second, third):
                await wait_ready(url)
            parent.serve(make_head(BASE, DELTA), DELTA)
            for url in (upper, second, third):
                await settled(url, 2)
                await gets(url, DELTA)
            assert parent.count(NEW.shards) == 0
            assert await metric(second, "shardcast_materialized_shards_total") == 6


async def test_with_deltas_alone_prefetched_a_whole_base_leads_on(tmp_path: Path) -> None:
    async with holding(tmp_path, BASE, prefetch=Prefetch.DELTAS) as (parent, url):
        await wait_head(url)
        await gets(url, BASE)
        await settled(url, 1)
        before = parent.count(BASE.shards)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        assert parent.count(NEW.shards) == 0
        assert parent.count(BASE.shards) == before


# --- faults -----------------------------------------------------------------------------------


async def test_a_signed_delta_that_is_wrong_costs_its_bytes_and_the_shards_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, LYING), LYING)
        await settled(url, 2)
        await gets(url, NEW)
        assert parent.count(NEW.shards) == len(set(NEW.shards))
        assert await metric(url, "shardcast_materialized_shards_total") == 0
        assert await metric(url, 'shardcast_materialize_failures_total{cause="delta"}') == 2
        told = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert any("shards 0-1" in text and "than were signed" in text for text in told)


async def test_one_wrong_frame_costs_its_own_shards_only(tmp_path: Path) -> None:
    other = next_version(BASE, 77)
    right, wrong = (
        with_delta(NEW, BASE, runs=[FIRST]),
        with_delta(NEW, BASE, runs=[LAST], like=other),
    )
    parts = [right.ref.deltas[0].parts[0], wrong.ref.deltas[0].parts[0]]
    delta = with_delta(NEW, BASE, runs=[FIRST, LAST]).ref.deltas[0]
    assert delta.parts[0] == parts[0]
    mixed = with_parts(DELTA, parts, {**right.blobs, **wrong.blobs})
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, mixed), mixed)
        await settled(url, 2)
        await gets(url, NEW)
        fetched = {ask.digest for ask in parent.asks} & set(NEW.shards)
        assert fetched == set(NEW.shards[2:])


@pytest.mark.parametrize("frame", [b"", b"SCF1", b"SCF2" + bytes(40), bytes(range(256)) * 9])
async def test_a_signed_blob_that_is_no_frame_is_of_no_use(tmp_path: Path, frame: bytes) -> None:
    bad = with_frame(frame or b"\0")
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, bad), bad)
        await settled(url, 2)
        await gets(url, NEW)
        assert await metric(url, 'shardcast_materialize_failures_total{cause="delta"}') == 1


async def test_an_unknown_codec_is_of_no_use(tmp_path: Path) -> None:
    strange = with_delta(NEW, BASE, codec="nobody.knows/9")
    async with holding(tmp_path, BASE) as (parent, url):
        parent.serve(make_head(BASE, strange), strange)
        await settled(url, 2)
        await gets(url, NEW)


async def test_a_poisoned_delta_blob_never_reaches_the_decoder(tmp_path: Path) -> None:
    parent, honest = ScriptedParent(), ScriptedParent()
    for digest in delta_blobs(DELTA):
        parent.script(digest, *[sends(noise(len(DELTA.blobs[digest]), 3))] * 50)
    for server in (parent, honest):
        server.serve(make_head(BASE, sequence=10**12), BASE)
    async with (
        parent.running(),
        honest.running(),
        running(settings(tmp_path / "r", parent.url, honest.url)) as url,
    ):
        await wait_ready(url)
        head = make_head(BASE, DELTA)
        for server in (parent, honest):
            server.serve(head, DELTA)
        await settled(url, 2)
        await gets(url, NEW)
        assert await metric(url, "shardcast_materialize_failures_total{") == 0
        assert honest.count(delta_blobs(DELTA)) == 2
        assert parent.count(NEW.shards) + honest.count(NEW.shards) == 0


async def test_a_delta_blob_that_nobody_has_is_not_waited_for(tmp_path: Path) -> None:
    first, _ = delta_blobs(DELTA)
    async with holding(tmp_path, BASE) as (parent, url):
        parent.script(first, *[refuses(404)] * 200)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        await gets(url, NEW)
        fetched = {ask.digest for ask in parent.asks} & set(NEW.shards)
        assert fetched == {NEW.shards[shard] for shard in FIRST}


async def test_a_base_that_rotted_on_the_disk_is_found_and_its_shards_are_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with holding(tmp_path, BASE) as (parent, url):
        file = tmp_path / "r" / RUN / "versions" / "000001" / "model.safetensors"
        await eventually(file.is_file)
        flip(file, 3 * SHARD + 5)
        before = parent.count(NEW.shards)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        await gets(url, NEW)
        fetched = {ask.digest for ask in parent.asks} & set(NEW.shards)
        assert before == 0
        assert fetched
        assert fetched <= {NEW.shards[shard] for shard in LAST}
        assert await metric(url, 'shardcast_materialize_failures_total{cause="base"}') == 1
        versions = (await status_of(url))["runs"][RUN]["versions"]
        assert next(v for v in versions if v["version"] == 1)["damaged"]
        assert any("of the base are damaged" in r.getMessage() for r in caplog.records)


async def test_without_its_base_a_version_is_fetched(tmp_path: Path) -> None:
    other = make_version(1, {"model.safetensors": noise(4 * SHARD, 50)})
    async with holding(tmp_path, other) as (parent, url):
        parent.serve(make_head(DELTA), DELTA)
        await settled(url, 2)
        await gets(url, NEW)
        assert await metric(url, "shardcast_materialized_shards_total") == 0


async def test_a_delta_that_does_not_come_on_is_given_up_after_a_while(tmp_path: Path) -> None:
    short = limits(rebuild_patience_s=0.3)
    async with holding(tmp_path, BASE, limits=short) as (parent, url):
        pause = Pause(after=10)
        parent.script(delta_blobs(DELTA)[0], pause)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await asyncio.wait_for(pause.reached.wait(), 20)

        async def given_up() -> bool:
            return (await http(url, path_of(NEW.shards[0]))).status == 200

        await eventually(given_up)
        assert parent.count(NEW.shards[0]) == 1
        pause.go.set()
        await settled(url, 2)


async def test_after_a_restart_in_the_middle_only_the_rest_is_rebuilt(tmp_path: Path) -> None:
    pause = Pause(after=10, abort=True)
    parent = ScriptedParent()
    parent.serve(make_head(BASE), BASE)
    async with parent.running():
        async with running(settings(tmp_path / "r", parent.url)) as url:
            await wait_ready(url)
            parent.script(delta_blobs(DELTA)[1], pause)
            parent.serve(make_head(BASE, DELTA), DELTA)
            await asyncio.wait_for(pause.reached.wait(), 20)

            async def first_is_here() -> bool:
                return (await http(url, path_of(NEW.shards[1]))).status == 200

            await eventually(first_is_here)
            pause.go.set()
        async with running(settings(tmp_path / "r", parent.url)) as url:
            await settled(url, 2)
            assert await metric(url, "shardcast_materialized_shards_total") <= 4
            await gets(url, NEW)
    assert parent.count(NEW.shards) == 0


async def test_the_base_is_not_evicted_while_a_version_is_rebuilt_from_it(tmp_path: Path) -> None:
    pause = Pause(after=10)
    async with holding(tmp_path, BASE) as (parent, url):
        parent.script(delta_blobs(DELTA)[1], pause)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await asyncio.wait_for(pause.reached.wait(), 20)
        other = Store(tmp_path / "r")
        assert not other.run(RUN).evict(1)
        other.close()
        pause.go.set()
        await settled(url, 2)
        assert parent.count(NEW.shards) == 0


async def test_a_base_that_vanished_is_as_good_as_none(tmp_path: Path) -> None:
    async with holding(tmp_path, BASE) as (parent, url):
        directory = tmp_path / "r" / RUN / "versions" / "000001"
        await eventually(directory.is_dir)
        shutil.rmtree(directory)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await settled(url, 2)
        await gets(url, NEW)


async def test_a_base_that_is_evicted_before_the_delta_is_begun_ends_the_hope(
    tmp_path: Path,
) -> None:
    """It was there when the head came: nobody waits out a patience for what cannot be any more."""
    long = limits(rebuild_patience_s=600.0)
    async with holding(tmp_path, BASE, limits=long) as (parent, url):
        pause = Pause(after=10)
        parent.script(NEW.layout, pause)
        parent.serve(make_head(BASE, DELTA), DELTA)
        await asyncio.wait_for(pause.reached.wait(), 20)
        assert (await status_of(url))["materialize"]["awaited"] == [{"run": RUN, "version": 2}]
        other = Store(tmp_path / "r")
        assert other.run(RUN).evict(1)
        other.close()
        pause.go.set()
        await settled(url, 2)
        await gets(url, NEW)
        assert (await status_of(url))["materialize"]["awaited"] == []


# --- configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"parents": ()}, {"parents": ("http://p",), "prefetch": Prefetch.DEMAND}]
)
def test_it_needs_a_parent_and_deltas(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--materialize"):
        RelayConfig(store=tmp_path, materialize=True, **options)


# --- what the tests above are made of ---------------------------------------------------------


def flip(file: Path, offset: int) -> None:
    """Changes a bit as a failing disk would: neither size nor time of the file tell."""
    found = file.stat()
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def with_parts(version: MadeVersion, parts: list[str], blobs: dict[str, bytes]) -> MadeVersion:
    """A version whose only delta lists other parts."""
    (delta,) = version.ref.deltas
    listed = msgspec.structs.replace(delta, parts=parts)
    ref = msgspec.structs.replace(version.ref, deltas=[listed])
    return replace(version, ref=ref, blobs={**version.blobs, **blobs})


def with_frame(frame: bytes) -> MadeVersion:
    """Version 2 with a delta of one frame for all shards, whatever it is."""
    part = encode_delta_part(
        DeltaPart(
            layout=NEW.layout,
            base=BASE.ref.manifest,
            codec="scf/1",
            first_shard=0,
            blobs=[DeltaBlob(digest=digest_of(frame), bytes=len(frame), frames=[(6, len(frame))])],
        )
    )
    blobs = {digest_of(part): part, digest_of(frame): frame}
    return with_parts(DELTA, [digest_of(part)], blobs)
