"""A version that streams: its parts are listed while its shards arrive."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from relay.config import Prefetch
from shardcast.protocol.delta import decode_delta_part
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenDeltaRef, OpenRef
from shardcast.protocol.layout import encode_part
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import QUICK, config, limits, running, wait_head, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.test_publishing import TOKEN, Origin, files_of, settings
from tests.contract.wire_client import eventually, http

VERSION = make_version(2, {"a": noise(4 * SHARD, 3)})
PARTS = {
    digest_of(data): data
    for data in (
        encode_part(VERSION.layout, 0, VERSION.shards[:2]),
        encode_part(VERSION.layout, 2, VERSION.shards[2:]),
    )
}
FIRST, SECOND = PARTS


def opened(*parts: str) -> OpenRef:
    return OpenRef(version=2, step=20, layout=VERSION.layout, parts=list(parts), deltas=[])


async def status(url: str, digest: str) -> int:
    return (await http(url, f"/v1/{RUN}/blobs/{digest}.bin")).status


async def test_a_relay_follows_an_open_version_and_commits_it_when_it_closes(
    tmp_path: Path,
) -> None:
    old = make_version(1)
    parent = ScriptedParent(blobs=dict(PARTS))
    parent.serve(make_head(old, opened=opened()), old, VERSION)
    async with parent.running():
        relay = config(tmp_path / "r", parent.url)
        async with running(relay) as url:
            await wait_ready(url)
            assert await status(url, VERSION.shards[0]) == 404
            parent.serve(make_head(old, opened=opened(SECOND)))
            await eventually(lambda: parent.count(VERSION.shards[2:]) == 2)
            assert await status(url, VERSION.shards[2]) == 200
            assert await status(url, VERSION.shards[0]) == 404
        async with running(relay) as url:  # a restart in the middle
            parent.serve(make_head(old, opened=opened(SECOND, FIRST)))
            await eventually(lambda: parent.count(VERSION.shards[:2]) == 2)
            parent.serve(make_head(old, VERSION))
            committed = tmp_path / "r" / RUN / "versions" / "000002" / "a"
            await eventually(committed.exists)
            assert committed.read_bytes() == VERSION.files["a"]
            assert parent.count(VERSION.shards) == 4
        async with running(relay) as url:
            await wait_ready(url)
            assert parent.count(VERSION.shards) == 4


async def test_publishing_an_open_version_over_http(tmp_path: Path) -> None:
    async with running(settings(tmp_path)) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        assert TOKEN.encode() in origin.token_file.read_bytes()
        assert await origin.put(VERSION.layout, VERSION.blobs[VERSION.layout]) == 201
        heads = [
            make_head(sequence=10**12, opened=opened()),
            make_head(sequence=10**12 + 1, opened=opened(FIRST)),
            make_head(VERSION, sequence=10**12 + 2),
        ]
        assert (await origin.head(heads[0], If_None_Match="*")).status == 201
        await wait_head(url)
        etag = f'"{digest_of(heads[0])}"'
        assert (await origin.head(heads[1], If_Match=etag)).status == 409
        assert await origin.put(FIRST, PARTS[FIRST]) == 201
        assert (await origin.head(heads[1], If_Match=etag)).status == 409
        for digest in VERSION.shards[:2]:
            assert await origin.put(digest, VERSION.blobs[digest]) == 201
        assert await status(url, VERSION.shards[0]) == 404
        assert (await origin.head(heads[1], If_Match=etag)).status == 200
        assert await status(url, VERSION.shards[0]) == 200
        etag = f'"{digest_of(heads[1])}"'
        # It closes with other parts than it streamed with: only the shards must be the same.
        for digest in (*VERSION.parts, VERSION.ref.manifest):
            assert await origin.put(digest, VERSION.blobs[digest]) == 201
        for digest in await origin.missing(VERSION.shards):
            assert await origin.put(digest, VERSION.blobs[digest]) == 201
        answer = await origin.head(heads[2], If_Match=etag)
        assert answer.status == 200, answer.body
        assert files_of(origin, 2) == dict(VERSION.files)


async def test_a_part_that_lied_while_the_version_was_open_is_corrected_when_it_closes(
    tmp_path: Path,
) -> None:
    """The relay verified other bytes there, as a signed part said; the closed version says otherwise."""
    old, wrong = make_version(1), noise(SHARD, 99)
    lie = encode_part(VERSION.layout, 0, [VERSION.shards[0], digest_of(wrong)])
    parent = ScriptedParent(blobs={digest_of(lie): lie, digest_of(wrong): wrong})
    parent.serve(make_head(old, opened=opened()), old, VERSION)
    async with parent.running(), running(config(tmp_path / "r", parent.url)) as url:
        await wait_ready(url)
        parent.serve(make_head(old, opened=opened(digest_of(lie))))

        async def believed() -> bool:
            return await status(url, digest_of(wrong)) == 200

        await eventually(believed)
        parent.serve(make_head(old, VERSION))
        committed = tmp_path / "r" / RUN / "versions" / "000002" / "a"
        await eventually(committed.exists)
        assert committed.read_bytes() == VERSION.files["a"]
        assert await status(url, digest_of(wrong)) == 404
        assert await status(url, VERSION.shards[1]) == 200


def delta_blob(version: MadeVersion) -> str:
    """The one blob of a version's one delta."""
    (part,) = version.ref.deltas[0].parts
    (blob,) = decode_delta_part(version.blobs[part]).blobs
    return blob.digest


async def test_the_delta_of_an_open_version_waits_for_no_older_one(tmp_path: Path) -> None:
    """One that does not come keeps one slot, however many heads come meanwhile, and nothing else."""
    old = make_version(1, deltas=[noise(100_000, 5)])
    new = make_version(2, dict(VERSION.files), deltas=[noise(5000, 9)])
    coming = OpenDeltaRef(base=None, base_version=None, parts=new.ref.deltas[0].parts)
    stuck = Pause(10)
    parent = ScriptedParent()
    parent.script(delta_blob(old), stuck)
    parent.serve(make_head(old), old)
    patient = replace(QUICK, read_timeout_s=60.0)
    options: dict[str, Any] = {
        "prefetch": Prefetch.DELTAS,
        "net": patient,
        "limits": limits(prefetch_fills=2),
    }
    async with parent.running(), running(config(tmp_path / "r", parent.url, **options)) as url:
        await stuck.reached.wait()
        for part in ([], list(PARTS)[:1]):
            parent.serve(make_head(old, opened=opened(*part)), VERSION)
            parent.blobs.update(PARTS)
            await eventually(lambda: parent.count(VERSION.layout) == 1)
            await eventually(lambda part=part: parent.count(part) == len(part))
        last = replace_deltas(opened(FIRST), coming)
        parent.serve(make_head(old, opened=last), new)
        await eventually(lambda: parent.count(delta_blob(new)) == 1)
        assert not stuck.go.is_set()
        assert await status(url, delta_blob(new)) == 200
        stuck.go.set()
        assert await status(url, delta_blob(old)) == 200
    assert parent.count(delta_blob(old)) == 1


def replace_deltas(opened: OpenRef, *deltas: OpenDeltaRef) -> OpenRef:
    return msgspec.structs.replace(opened, deltas=list(deltas))
