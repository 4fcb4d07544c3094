"""Publishing over HTTP: every status that docs/PROTOCOL.md promises."""

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.authorization import is_private
from shardcast.protocol.digest import digest_of
from shardcast.protocol.layout import encode_part
from shardcast.store.store import Store
from tests.contract.made import (
    RUN,
    SHARD,
    MadeVersion,
    make_head,
    make_version,
    noise,
    publish,
    signer,
)
from tests.contract.relays import config, limits, running, wait_head
from tests.contract.wire_client import Answer, Wire, eventually, http

TOKEN = "correct-horse-battery"
VERSION = make_version(1, {"model": noise(3 * SHARD + 77), "config.json": b"{}"})


@dataclass
class Origin:
    url: str
    store: Path
    token_file: Path

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        token: str | None = TOKEN,
    ) -> Answer:
        auth = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await http(self.url, path, method, {**auth, **(headers or {})}, body)

    async def put(self, digest: str, body: bytes, **options: Any) -> int:
        path = f"/v1/{RUN}/blobs/{digest}.bin"
        return (await self.ask("PUT", path, body, **options)).status

    async def head(self, body: bytes, **condition: str) -> Answer:
        headers = {name.replace("_", "-"): value for name, value in condition.items()}
        return await self.ask("PUT", f"/v1/{RUN}/head", body, headers)

    async def missing(self, digests: list[str]) -> list[str]:
        body = json.dumps({"digests": digests}).encode()
        answer = await self.ask("POST", f"/v1/{RUN}/missing", body)
        assert answer.status == 200, answer.body
        found = json.loads(answer.body)["missing"]
        assert isinstance(found, list)
        return found

    async def documents(self, version: MadeVersion = VERSION) -> None:
        for digest in version.documents:
            assert await self.put(digest, version.blobs[digest]) in (200, 201)

    async def everything(self, version: MadeVersion = VERSION) -> None:
        """What a publisher does before the head."""
        await self.documents(version)
        for digest in await self.missing(list(dict.fromkeys(version.shards))):
            assert await self.put(digest, version.blobs[digest]) == 201


def settings(tmp_path: Path, **options: Any) -> Any:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    options.setdefault("pubkeys", (signer(1).public_key,))
    return config(tmp_path / "store", publish_token_file=token_file, **options)


@pytest_asyncio.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    async with running(settings(tmp_path)) as url:
        yield Origin(url, tmp_path / "store", tmp_path / "token")


def files_of(origin: Origin, number: int = 1) -> dict[str, bytes]:
    root = origin.store / RUN / "versions" / f"{number:06d}"
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


async def test_the_whole_way(origin: Origin) -> None:
    everything = VERSION.documents + VERSION.shards
    assert await origin.missing(everything) == everything
    for digest in VERSION.documents:
        assert await origin.put(digest, VERSION.blobs[digest]) == 201
        assert await origin.put(digest, VERSION.blobs[digest]) == 200
    for digest in VERSION.shards:
        assert await origin.put(digest, VERSION.blobs[digest]) == 201
        assert await origin.put(digest, VERSION.blobs[digest]) == 200
    assert await origin.missing(everything) == []
    for digest in everything:  # nothing is visible before the head
        assert (await http(origin.url, f"/v1/{RUN}/blobs/{digest}.bin")).status == 404
    assert (await http(origin.url, f"/v1/{RUN}/head")).status == 404
    envelope = make_head(VERSION)
    answer = await origin.head(envelope, If_None_Match="*")
    assert answer.status == 201
    assert answer["ETag"] == f'"{digest_of(envelope)}"'
    served = await http(origin.url, f"/v1/{RUN}/head")
    assert served.body == envelope
    for digest in everything:
        answer = await http(origin.url, f"/v1/{RUN}/blobs/{digest}.bin")
        assert digest_of(answer.body) == digest
    assert files_of(origin) == dict(VERSION.files)
    assert not list((origin.store / RUN / "state" / "staging").iterdir())  # no second copy


async def test_followers_hear_of_a_published_head_at_once(origin: Origin) -> None:
    await origin.everything()
    first = make_head(VERSION, sequence=10**12)
    assert (await origin.head(first, If_None_Match="*")).status == 201
    async with Wire(origin.url) as wire:
        await wire.ask(f"/v1/{RUN}/head?after={10**12}&wait=25")
        second = make_head(VERSION)
        etag = f'"{digest_of(first)}"'
        assert (await origin.head(second, If_Match=etag)).status == 200
        assert (await wire.answer()).body == second


# --- who may --------------------------------------------------------------------------------------

WRITES = [
    ("POST", f"/v1/{RUN}/missing"),
    ("PUT", f"/v1/{RUN}/blobs/{'0' * 64}.bin"),
    ("PUT", f"/v1/{RUN}/head"),
]


@pytest.mark.parametrize(("method", "path"), WRITES)
async def test_a_wrong_token_is_401(origin: Origin, method: str, path: str) -> None:
    for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
        answer = await origin.ask(method, path, b"{}", token=token)
        assert answer.status == 401
        assert answer["WWW-Authenticate"].startswith("Bearer")
        assert TOKEN.encode() not in answer.body
    basic = await http(origin.url, path, method, {"Authorization": f"Basic {TOKEN}"}, b"")
    assert basic.status == 401


@pytest.mark.parametrize(("method", "path"), WRITES)
async def test_without_a_token_file_it_is_403(tmp_path: Path, method: str, path: str) -> None:
    async with running(config(tmp_path / "s")) as url:
        answer = await http(url, path, method, {"Authorization": f"Bearer {TOKEN}"}, b"{}")
        assert answer.status == 403


def test_only_tls_or_loopback_counts_as_private() -> None:
    assert is_private(("127.0.0.1", 1), tls=False)
    assert is_private(("127.9.9.9", 1), tls=False)
    assert is_private(("::1", 1, 0, 0), tls=False)
    assert is_private(("::ffff:127.0.0.1", 1, 0, 0), tls=False)
    assert not is_private(("10.0.0.1", 1), tls=False)
    assert not is_private(("::ffff:10.0.0.1", 1, 0, 0), tls=False)
    assert not is_private(("fe80::1%eth0", 1, 0, 2), tls=False)
    assert not is_private("", tls=False)
    assert not is_private(None, tls=False)
    assert is_private(("10.0.0.1", 1), tls=True)


async def test_a_run_whose_key_nobody_knows_is_403(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pubkeys=())) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        body = VERSION.blobs[VERSION.layout]
        assert await origin.put(VERSION.layout, body) == 403
        assert (await origin.head(make_head(VERSION), If_None_Match="*")).status == 403
    assert not (tmp_path / "store" / RUN).exists()


async def test_first_use_takes_the_first_key_and_no_other(tmp_path: Path) -> None:
    async with running(settings(tmp_path, pubkeys=(), first_use=True)) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        await origin.everything()
        first = make_head(VERSION, sequence=10**12)
        assert (await origin.head(first, If_None_Match="*")).status == 201
        etag = f'"{digest_of(first)}"'
        assert (await origin.head(make_head(VERSION, key=2), If_Match=etag)).status == 403
        assert (await origin.head(make_head(VERSION), If_Match=etag)).status == 200


# --- blobs ----------------------------------------------------------------------------------------


async def test_wrong_bytes_are_422_and_are_not_kept(origin: Origin) -> None:
    await origin.documents()
    digest = VERSION.shards[1]
    wrong = bytes([VERSION.blobs[digest][0] ^ 1]) + VERSION.blobs[digest][1:]
    assert await origin.put(digest, wrong) == 422
    assert await origin.put(digest, b"short") == 422
    assert await origin.missing([digest]) == [digest]
    assert await origin.put(digest, VERSION.blobs[digest]) == 201
    assert await origin.put("0" * 64, VERSION.blobs[VERSION.layout]) == 422
    assert await origin.put(digest, wrong) == 200  # it is there: the body is not looked at
    assert await origin.missing([digest]) == []


async def test_what_no_document_names_is_409(origin: Origin) -> None:
    data = noise(1000)
    answer = await origin.ask("PUT", f"/v1/{RUN}/blobs/{digest_of(data)}.bin", data)
    assert answer.status == 409
    assert b"no uploaded document names" in answer.body
    for text in (b"{}", b'{"format":"shardcast.head/1"}', b'{"format":"shardcast.layout/1"}'):
        assert await origin.put(digest_of(text), text) == 409


async def test_documents_in_any_order(origin: Origin) -> None:
    for digest in reversed(VERSION.documents):
        assert await origin.put(digest, VERSION.blobs[digest]) == 201
    for digest in reversed(VERSION.shards):
        assert await origin.put(digest, VERSION.blobs[digest]) == 201
    assert (await origin.head(make_head(VERSION), If_None_Match="*")).status == 201


async def test_bodies_are_bounded(origin: Origin) -> None:
    async with Wire(origin.url) as wire:
        auth = {"Authorization": f"Bearer {TOKEN}"}
        await wire.ask(
            f"/v1/{RUN}/blobs/{'1' * 64}.bin", "PUT", {**auth, "Content-Length": str(1 << 30)}
        )
        assert (await wire.answer()).status == 413
    async with Wire(origin.url) as wire:
        await wire.ask(
            f"/v1/{RUN}/blobs/{'1' * 64}.bin", "PUT", {**auth, "Transfer-Encoding": "chunked"}
        )
        assert (await wire.answer()).status == 411
    async with Wire(origin.url) as wire:
        await wire.ask(
            f"/v1/{RUN}/head",
            "PUT",
            {**auth, "If-None-Match": "*", "Content-Length": str(1 << 21)},
        )
        assert (await wire.answer()).status == 413


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"digests": 1}', b'{"digests": ["x"]}', b"\xff\xfe"]
)
async def test_a_malformed_question_is_400(origin: Origin, body: bytes) -> None:
    assert (await origin.ask("POST", f"/v1/{RUN}/missing", body)).status == 400


async def test_a_body_that_stops_is_408_and_leaves_nothing(tmp_path: Path) -> None:
    quick = settings(tmp_path, limits=limits(body_timeout_s=0.2))
    async with running(quick) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        await origin.documents()
        digest = VERSION.shards[1]
        auth = {"Authorization": f"Bearer {TOKEN}", "Content-Length": str(SHARD)}
        async with Wire(url) as wire:
            await wire.ask(f"/v1/{RUN}/blobs/{digest}.bin", "PUT", auth)
            await wire.send(VERSION.blobs[digest][:1000])
            assert (await wire.answer()).status == 408
        assert await origin.missing([digest]) == [digest]
        assert await origin.put(digest, VERSION.blobs[digest]) == 201


async def test_a_client_that_leaves_in_the_middle_can_come_again(origin: Origin) -> None:
    await origin.documents()
    digest = VERSION.shards[1]
    auth = {"Authorization": f"Bearer {TOKEN}", "Content-Length": str(SHARD)}
    async with Wire(origin.url) as wire:
        await wire.ask(f"/v1/{RUN}/blobs/{digest}.bin", "PUT", auth)
        await wire.send(VERSION.blobs[digest][:100_000])

    async def again() -> bool:
        return await origin.put(digest, VERSION.blobs[digest]) == 201

    await eventually(again)


async def test_expect_100_continue(origin: Origin) -> None:
    await origin.documents()
    digest = VERSION.shards[1]
    expect = {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Length": str(SHARD),
        "Expect": "100-continue",
    }
    async with Wire(origin.url) as wire:
        await wire.ask(f"/v1/{RUN}/blobs/{digest}.bin", "PUT", expect)
        status, _headers = await wire.head()
        assert status == 100
        await wire.send(VERSION.blobs[digest])
        assert (await wire.answer()).status == 201
    async with Wire(origin.url) as wire:  # what is refused is refused before the body
        await wire.ask(f"/v1/{RUN}/blobs/{digest}.bin", "PUT", {**expect, "Authorization": "no"})
        assert (await wire.answer()).status == 401


async def test_delta_blobs(origin: Origin) -> None:
    deltas = [noise(300_000, 8), noise(10, 9)]
    version = make_version(1, deltas=deltas)
    await origin.everything(version)
    (part,) = version.ref.deltas[0].parts
    blobs = [digest_of(data) for data in deltas]
    assert await origin.put(blobs[0], deltas[0]) == 409
    assert await origin.put(part, version.blobs[part]) == 201
    assert (await origin.head(make_head(version), If_None_Match="*")).status == 409
    assert await origin.missing(blobs) == blobs
    assert await origin.put(blobs[0], deltas[0]) == 201
    assert await origin.put(blobs[1], deltas[1][:-1] + b"?") == 422
    assert await origin.put(blobs[1], deltas[1]) == 201
    assert await origin.missing(blobs) == []
    assert (await origin.head(make_head(version), If_None_Match="*")).status == 201
    answer = await http(origin.url, f"/v1/{RUN}/blobs/{blobs[0]}.bin")
    assert answer.body == deltas[0]


# --- heads ----------------------------------------------------------------------------------------


async def test_a_head_needs_a_condition_and_it_must_hold(origin: Origin) -> None:
    await origin.everything()
    first, second = make_head(VERSION, sequence=10**12), make_head(VERSION)
    etag = f'"{digest_of(first)}"'
    assert (await origin.head(first)).status == 428
    assert (await origin.head(first, If_Match=etag)).status == 412
    assert (await origin.head(first, If_None_Match="*")).status == 201
    assert (await origin.head(first, If_None_Match="*")).status == 200  # the answer was lost
    assert (await origin.head(second, If_None_Match="*")).status == 412
    assert (await origin.head(second, If_Match='"other"')).status == 412
    assert (await origin.head(second, If_Match=f"W/{etag}")).status == 412
    assert (await origin.head(second, If_Match=etag)).status == 200


async def test_a_head_must_be_trusted_and_newer(origin: Origin) -> None:
    await origin.everything()
    first = make_head(VERSION, sequence=10**12)
    etag = f'"{digest_of(first)}"'
    assert (await origin.head(make_head(VERSION, key=2), If_None_Match="*")).status == 403
    assert (await origin.head(make_head(VERSION, run="other"), If_None_Match="*")).status == 403
    assert (await origin.head(b"{}", If_None_Match="*")).status == 400
    assert (await origin.head(first, If_None_Match="*")).status == 201
    assert (await origin.head(make_head(VERSION, sequence=5), If_Match=etag)).status == 409


async def test_a_head_whose_blobs_are_not_all_here_is_409(origin: Origin) -> None:
    envelope = make_head(VERSION)
    answer = await origin.head(envelope, If_None_Match="*")
    assert answer.status == 409
    assert VERSION.ref.manifest.encode() in answer.body
    await origin.documents()
    for digest in VERSION.shards[1:]:
        await origin.put(digest, VERSION.blobs[digest])
    answer = await origin.head(envelope, If_None_Match="*")
    assert answer.status == 409
    assert VERSION.shards[0].encode() in answer.body
    assert (await http(origin.url, f"/v1/{RUN}/head")).status == 404
    await origin.put(VERSION.shards[0], VERSION.blobs[VERSION.shards[0]])
    assert (await origin.head(envelope, If_None_Match="*")).status == 201


async def test_unchanged_shards_are_not_uploaded_again(origin: Origin) -> None:
    await origin.everything()
    first = make_head(VERSION, sequence=10**12)
    assert (await origin.head(first, If_None_Match="*")).status == 201
    second = make_version(
        2,
        {
            "model": noise(SHARD, 4) + VERSION.files["model"][SHARD:],  # one shard changed
            "config.json": b"{}",  # a whole file as before
            "copy": VERSION.files["model"],  # a whole file under another name
            "zeros": bytes(3 * SHARD),  # equal shards within the version
        },
    )
    await origin.documents(second)
    lacking = await origin.missing(list(dict.fromkeys(second.shards)))
    assert sorted(lacking) == sorted({second.shards[0], second.shards[-1]})
    for digest in lacking:
        assert await origin.put(digest, second.blobs[digest]) == 201
    answer = await origin.head(make_head(VERSION, second), If_Match=f'"{digest_of(first)}"')
    assert answer.status == 200, answer.body
    assert files_of(origin, 2) == dict(second.files)


async def test_a_restart_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    sent = VERSION.shards[:2]
    async with running(settings(tmp_path)) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        await origin.documents()
        for digest in sent:
            assert await origin.put(digest, VERSION.blobs[digest]) == 201
    async with running(settings(tmp_path)) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        assert await origin.missing(VERSION.documents) == []
        lacking = await origin.missing(VERSION.shards)
        assert lacking == [d for d in VERSION.shards if d not in sent]
        for digest in lacking:
            assert await origin.put(digest, VERSION.blobs[digest]) == 201
        assert (await origin.head(make_head(VERSION), If_None_Match="*")).status == 201
        assert files_of(origin) == dict(VERSION.files)


async def test_a_version_number_is_never_used_for_other_content(origin: Origin) -> None:
    await origin.everything()
    first = make_head(VERSION, sequence=10**12)
    assert (await origin.head(first, If_None_Match="*")).status == 201
    other = make_version(1, {"other": noise(10)})
    answer = await origin.ask(
        "PUT", f"/v1/{RUN}/blobs/{other.layout}.bin", other.blobs[other.layout]
    )
    assert answer.status == 409


async def test_too_many_versions_at_once_are_503(tmp_path: Path) -> None:
    async with running(settings(tmp_path, limits=limits(max_pending=2))) as url:
        origin = Origin(url, tmp_path / "store", tmp_path / "token")
        statuses = []
        for number in (1, 2, 3):
            version = make_version(number)
            statuses.append(await origin.put(version.layout, version.blobs[version.layout]))
        assert statuses == [201, 201, 503]


async def test_withdrawing_uploads_nothing(origin: Origin) -> None:
    import msgspec

    from shardcast.protocol.envelope import open_unverified, seal
    from shardcast.protocol.head import decode_head, encode_head

    second = make_version(2)
    await origin.everything()
    await origin.everything(second)
    first = make_head(VERSION, second, sequence=10**12)
    assert (await origin.head(first, If_None_Match="*")).status == 201
    head = decode_head(open_unverified(first)[1])
    changed = msgspec.structs.replace(head, sequence=10**12 + 1, version=1, withdrawn=[2])
    envelope = seal(encode_head(changed), [signer(1)])
    assert (await origin.head(envelope, If_Match=f'"{digest_of(first)}"')).status == 200


async def test_a_local_publisher_and_a_remote_one_do_not_overwrite_each_other(
    origin: Origin, tmp_path: Path
) -> None:
    await origin.everything()
    envelope = make_head(VERSION)
    await asyncio.to_thread(publish, origin.store, tmp_path / "local", {"a": b"x"})
    assert (await origin.head(envelope, If_None_Match="*")).status == 412
    await wait_head(origin.url)
    store = Store(origin.store)
    assert (await http(origin.url, f"/v1/{RUN}/head")).body == store.run(RUN).read_head()
    store.close()


async def test_what_no_head_has_announced_stays_within_the_quota(tmp_path: Path) -> None:
    """A token without the key fills the disk up to the quota, over all versions and runs."""
    first = make_version(1, {"model": noise(3 * SHARD)})
    second = make_version(2, {"model": noise(3 * SHARD, 1)})
    foreign = make_version(1, {"model": noise(3 * SHARD, 2)}, run="other")
    options = settings(tmp_path, quota_bytes=5 * SHARD)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        await origin.everything(first)
        assert await origin.put(second.layout, second.blobs[second.layout]) == 507
        path = f"/v1/other/blobs/{foreign.layout}.bin"
        answer = await origin.ask("PUT", path, foreign.blobs[foreign.layout])
        assert answer.status == 507
        assert b"quota" in answer.body
        assert (await origin.head(make_head(first), If_None_Match="*")).status == 201
        await origin.everything(second)  # what was announced counts no more


async def test_an_upload_into_what_is_just_being_evicted_may_come_again(tmp_path: Path) -> None:
    """503 and not 403, which ends a publisher."""
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        await origin.documents()
        directory = options.store / RUN / "state" / "staging" / "000001"
        shard = VERSION.shards[0]
        evicting = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(evicting, fcntl.LOCK_EX)
            assert await origin.put(shard, VERSION.blobs[shard]) == 503
        finally:
            os.close(evicting)
        assert await origin.put(shard, VERSION.blobs[shard]) == 201


async def test_a_document_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    """No memory, no file, and no reason to refuse what comes after it."""
    options = settings(tmp_path)
    async with running(options) as url:
        origin = Origin(url, options.store, options.publish_token_file)
        assert await origin.put(VERSION.layout, VERSION.blobs[VERSION.layout]) == 201
        shards = [digest_of(bytes([n])) for n in range(200)]  # more than the layout has
        part = encode_part(VERSION.layout, 0, shards)
        assert await origin.put(digest_of(part), part) == 409
        assert not (options.store / RUN / "blobs" / f"{digest_of(part)}.bin").exists()
        await origin.everything()
        assert (await origin.head(make_head(VERSION), If_None_Match="*")).status == 201
