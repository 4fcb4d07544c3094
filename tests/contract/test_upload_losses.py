"""An origin that takes uploads never loses what it said it has, nor says that it has what it lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from relay import sparing
from relay.uploads import Uploads
from shardcast.protocol.digest import digest_of
from shardcast.protocol.head import OpenRef
from shardcast.protocol.layout import decode_layout, encode_layout, encode_part
from shardcast.protocol.manifest import encode_manifest
from shardcast.store.retention import collect, unnamed_lock
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, MadeVersion, make_head, make_version, noise
from tests.contract.relays import running
from tests.contract.test_publishing import Origin, settings
from tests.contract.wire_client import http

DELTA = noise(70_000, 8)
OLD = make_version(1)
NEW = make_version(2, {"model": noise(3 * SHARD + 77, 2)}, deltas=[DELTA])
(DELTA_PART,) = NEW.ref.deltas[0].parts
DELTA_BLOB = digest_of(DELTA)
FIRST = encode_part(NEW.layout, 0, NEW.shards[:2])
OPENED = OpenRef(version=2, step=20, layout=NEW.layout, parts=[digest_of(FIRST)], deltas=[])


async def status(origin: Origin, digest: str) -> int:
    return (await http(origin.url, f"/v1/{RUN}/blobs/{digest}.bin")).status


async def announced(origin: Origin) -> str:
    """Publish the old version; return the head's ETag."""
    await origin.everything(OLD)
    envelope = make_head(OLD, sequence=10**12)
    assert (await origin.head(envelope, If_None_Match="*")).status == 201
    return f'"{digest_of(envelope)}"'


async def opened(origin: Origin) -> str:
    """Publish the old version, and half of the new one as open; return the head's ETag."""
    etag = await announced(origin)
    assert await origin.put(NEW.layout, NEW.blobs[NEW.layout]) == 201
    assert await origin.put(digest_of(FIRST), FIRST) == 201
    for digest in NEW.shards[:2]:
        assert await origin.put(digest, NEW.blobs[digest]) == 201
    envelope = make_head(OLD, sequence=10**12 + 1, opened=OPENED)
    assert (await origin.head(envelope, If_Match=etag)).status == 200
    return f'"{digest_of(envelope)}"'


def gc(origin: Origin) -> bool:
    """Collect as another process does; say whether documents were left alone."""
    run = Store(origin.store).run(RUN)
    try:
        return collect(run, ()).uploading
    finally:
        run.close()


async def finish(origin: Origin, etag: str, version: MadeVersion = NEW) -> None:
    answer = await origin.head(make_head(OLD, version), If_Match=etag)
    assert answer.status == 200, answer.body
    for digest in (*version.documents, *version.shards, DELTA_PART, DELTA_BLOB):
        assert await status(origin, digest) == 200


@pytest.mark.parametrize("restart", [False, True])
async def test_what_was_uploaded_outlives_every_collection(tmp_path: Path, restart: bool) -> None:
    options = settings(tmp_path)
    steps = [*NEW.documents, DELTA_PART, DELTA_BLOB, *NEW.shards]
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await announced(origin)
        for digest in steps[:5]:
            assert await origin.put(digest, NEW.blobs[digest]) == 201
            assert not await asyncio.to_thread(gc, origin)
        if not restart:
            for digest in steps[5:]:
                assert await origin.put(digest, NEW.blobs[digest]) == 201
                assert not await asyncio.to_thread(gc, origin)
            await finish(origin, etag)
            return
    assert not gc(origin)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        # It goes on where it was: what it was told that is here, it does not ask for again.
        for digest in steps[5:]:
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        await finish(origin, etag)


async def test_what_comes_before_its_layout_outlives_every_collection(tmp_path: Path) -> None:
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await announced(origin)
        for digest in (DELTA_PART, NEW.ref.manifest, *NEW.parts):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
            assert await asyncio.to_thread(gc, origin)
        assert await origin.put(NEW.layout, NEW.blobs[NEW.layout]) == 201
        for digest in (DELTA_BLOB, *NEW.shards):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
            assert not await asyncio.to_thread(gc, origin)
        await finish(origin, etag)


async def test_a_document_waits_for_a_collection_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparing, "WAIT_S", 0.0)
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        await announced(origin)
        lock = unnamed_lock(Store(options.store).run(RUN), exclusive=True)
        lock.acquire()
        try:
            assert await origin.put(NEW.layout, NEW.blobs[NEW.layout]) == 503
        finally:
            lock.release()
        assert await origin.missing([NEW.layout]) == [NEW.layout]
        assert await origin.put(NEW.layout, NEW.blobs[NEW.layout]) == 201


@pytest.mark.parametrize(
    "lost",
    [NEW.layout, NEW.parts[0], NEW.ref.manifest, DELTA_PART, DELTA_BLOB],
    ids=["layout", "part", "manifest", "delta part", "delta blob"],
)
async def test_a_head_that_reaches_what_the_disk_lost_is_refused_until_it_came_again(
    tmp_path: Path, lost: str
) -> None:
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await announced(origin)
        await origin.everything(NEW)
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        (options.store / RUN / "blobs" / f"{lost}.bin").unlink()
        answer = await origin.head(make_head(OLD, NEW), If_Match=etag)
        assert answer.status == 409
        assert lost.encode() in answer.body
        assert await origin.missing([lost]) == [lost]
        assert await origin.put(lost, NEW.blobs[lost]) == 201
        await finish(origin, etag)


@pytest.mark.parametrize("lost", [NEW.layout, digest_of(FIRST)], ids=["layout", "part"])
async def test_an_open_version_whose_document_the_disk_lost_is_not_announced(
    tmp_path: Path, lost: str
) -> None:
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await opened(origin)
        (options.store / RUN / "blobs" / f"{lost}.bin").unlink()
        again = make_head(OLD, opened=OPENED)
        answer = await origin.head(again, If_Match=etag)
        assert answer.status == 409
        assert lost.encode() in answer.body
        body = {NEW.layout: NEW.blobs[NEW.layout], digest_of(FIRST): FIRST}[lost]
        assert await origin.put(lost, body) == 201
        assert (await origin.head(again, If_Match=etag)).status == 200


async def test_a_delta_blob_longer_than_any_document_stays(tmp_path: Path) -> None:
    """Also where it begins as a document does."""
    big = b"{" + noise(17 << 20, 3)
    version = make_version(2, deltas=[big])
    (part,) = version.ref.deltas[0].parts
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await announced(origin)
        await origin.everything(version)
        for digest in (part, digest_of(big)):
            assert await origin.put(digest, version.blobs[digest]) == 201
        for _ in range(2):
            assert await origin.missing([digest_of(big)]) == []
        assert (await origin.head(make_head(OLD, version), If_Match=etag)).status == 200
        assert await status(origin, digest_of(big)) == 200


# --- who has the token and no key -----------------------------------------------------------------


def rival_layout() -> bytes:
    layout = decode_layout(NEW.blobs[NEW.layout])
    return encode_layout(msgspec.structs.replace(layout, created_at=layout.created_at + 1))


async def test_another_layout_does_not_take_the_place_of_an_open_version(tmp_path: Path) -> None:
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await opened(origin)
        rival = rival_layout()
        path = f"/v1/{RUN}/blobs/{digest_of(rival)}.bin"
        for _ in range(2):
            answer = await origin.ask("PUT", path, rival)
            assert answer.status == 409
            assert b"was announced with layout" in answer.body
        assert not (options.store / RUN / "blobs" / f"{digest_of(rival)}.bin").exists()
        for digest in (NEW.layout, digest_of(FIRST), *NEW.shards[:2]):
            assert await status(origin, digest) == 200
        await origin.everything(NEW)  # its publisher goes on
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        await finish(origin, etag)


async def test_other_shards_do_not_take_the_place_of_those_of_an_open_version(
    tmp_path: Path,
) -> None:
    """A manifest may name other parts than the head did, but no other shards."""
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await opened(origin)
        part = encode_part(NEW.layout, 0, NEW.shards[1:] + NEW.shards[:1])
        manifest = encode_manifest(NEW.layout, [digest_of(part)])
        assert await origin.put(digest_of(manifest), manifest) == 201
        assert await origin.put(digest_of(part), part) == 409
        for digest in (NEW.layout, digest_of(FIRST), *NEW.shards[:2]):
            assert await status(origin, digest) == 200
        await origin.everything(NEW)
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        await finish(origin, etag)


async def test_nothing_changes_a_version_while_its_head_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(tmp_path)
    statuses: list[int] = []
    looked = Uploads.lacking

    async def lacking(self: Uploads, *heads: object) -> list[str]:
        absent = await looked(self, *heads)  # type: ignore[arg-type]
        if not absent:
            rival = rival_layout()
            statuses.append(await origin.put(digest_of(rival), rival))
        return absent

    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await announced(origin)
        await origin.everything(NEW)
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        monkeypatch.setattr(Uploads, "lacking", lacking)
        await finish(origin, etag)
    assert statuses == [503]


async def test_an_open_version_that_was_given_up_keeps_its_number(tmp_path: Path) -> None:
    """Readers remember its layout; its publisher may go on with that, or takes the next number."""
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await opened(origin)
        given_up = make_head(OLD, sequence=10**12 + 2)
        assert (await origin.head(given_up, If_Match=etag)).status == 200
        etag = f'"{digest_of(given_up)}"'
        rival = rival_layout()
        assert await origin.put(digest_of(rival), rival) == 409
        await origin.everything(NEW)
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        await finish(origin, etag)


async def test_a_version_that_was_removed_while_it_was_uploaded_can_be_sent_again(
    tmp_path: Path,
) -> None:
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        etag = await opened(origin)
        again = make_head(OLD, sequence=10**12 + 2, opened=OPENED)
        assert Store(options.store).run(RUN).evict(2)
        answer = await origin.head(again, If_Match=etag)
        assert answer.status == 409
        assert NEW.layout.encode() in answer.body
        assert await origin.put(NEW.shards[0], NEW.blobs[NEW.shards[0]]) == 409
        for digest in (NEW.layout, digest_of(FIRST)):  # here, and registered anew
            assert await origin.missing([digest]) == []
        for digest in NEW.shards[:2]:
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        assert (await origin.head(again, If_Match=etag)).status == 200
        for digest in NEW.shards[:2]:
            assert await status(origin, digest) == 200


async def test_an_open_version_that_the_origin_lost_can_be_sent_again(tmp_path: Path) -> None:
    """Its documents are here, and a head names them: they are registered again all the same."""
    options = settings(tmp_path)
    async with running(options) as url:
        etag = await opened(Origin(url, options.store, options.publish_token_file))
    assert Store(options.store).run(RUN).evict(2)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        assert await origin.missing([NEW.layout, digest_of(FIRST)]) == []
        for digest in NEW.shards[:2]:
            assert await origin.put(digest, NEW.blobs[digest]) == 201
            assert await status(origin, digest) == 200
        await origin.everything(NEW)
        for digest in (DELTA_PART, DELTA_BLOB):
            assert await origin.put(digest, NEW.blobs[digest]) == 201
        await finish(origin, etag)
