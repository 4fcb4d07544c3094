"""The reading half of the HTTP surface (docs/PROTOCOL.md; RFC 9110, RFC 9111)."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from shardcast.protocol.digest import digest_of
from shardcast.store.directory import VersionDirectory
from shardcast.store.store import Store
from tests.contract.made import RUN, SHARD, make_head, make_version, noise, publish, signer
from tests.contract.relays import config, running, wait_head
from tests.contract.wire_client import Wire, eventually, http

FILES = {"a.safetensors": noise(3 * SHARD + 77), "config.json": b"{}", "empty": b""}


@dataclass
class Origin:
    url: str
    store: Path
    source: Path
    manifest: str
    shards: list[str]

    def blob(self, digest: str) -> str:
        return f"/v1/{RUN}/blobs/{digest}.bin"


@pytest_asyncio.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    store, source = tmp_path / "store", tmp_path / "checkpoint"
    manifest = await asyncio.to_thread(publish, store, source, FILES)
    opened = Store(store)
    stored = opened.run(RUN).stored(1)
    assert stored is not None
    shards = [digest for digest in stored.version.digests if digest is not None]
    opened.close()
    async with running(config(store)) as url:
        await wait_head(url)
        yield Origin(url, store, source, manifest, shards)


async def test_head_is_the_stored_envelope_verbatim(origin: Origin) -> None:
    answer = await http(origin.url, f"/v1/{RUN}/head")
    assert answer.status == 200
    assert answer.body == (origin.store / RUN / "head.json").read_bytes()
    assert answer["ETag"] == f'"{digest_of(answer.body)}"'
    assert answer["Cache-Control"] == "public, max-age=1"
    assert answer["Shardcast-Depth"] == "0"
    assert len(answer["Shardcast-Node"]) == 32
    assert "vary" not in answer.headers


async def test_head_is_never_304(origin: Origin) -> None:
    etag = (await http(origin.url, f"/v1/{RUN}/head"))["ETag"]
    answer = await http(origin.url, f"/v1/{RUN}/head", headers={"If-None-Match": etag})
    assert answer.status == 200
    assert answer.body


async def test_blob_headers(origin: Origin) -> None:
    digest = origin.shards[0]
    answer = await http(origin.url, origin.blob(digest))
    assert answer.status == 200
    assert digest_of(answer.body) == digest
    assert answer["Content-Length"] == str(len(answer.body))
    assert answer["Accept-Ranges"] == "bytes"
    assert answer["ETag"] == f'"blake3-{digest}"'
    assert answer["Cache-Control"] == "public, max-age=31536000, immutable, no-transform"
    assert answer["Content-Type"] == "application/octet-stream"
    assert answer["Shardcast-Source"] == "disk"
    assert not answer.headers.keys() & {"vary", "content-encoding", "set-cookie"}


async def test_every_blob_of_a_version_can_be_fetched(origin: Origin) -> None:
    async with Wire(origin.url) as wire:  # all over one connection
        for digest in [origin.manifest, *origin.shards]:
            await wire.ask(origin.blob(digest))
            assert digest_of((await wire.answer()).body) == digest


@pytest.mark.parametrize("digest_index", [0, -1])
async def test_head_request_has_the_headers_of_get(origin: Origin, digest_index: int) -> None:
    path = origin.blob(origin.shards[digest_index])
    get, head = await http(origin.url, path), await http(origin.url, path, "HEAD")
    assert head.status == get.status
    assert head.body == b""
    assert {**head.headers, "date": []} == {**get.headers, "date": []}


async def test_connection_stays_usable_after_head_range_and_error(origin: Origin) -> None:
    async with Wire(origin.url) as wire:
        for method, path, headers, status in [
            ("HEAD", origin.blob(origin.shards[0]), {}, 200),
            ("GET", origin.blob(origin.shards[0]), {"Range": "bytes=1-2"}, 206),
            ("GET", origin.blob("0" * 64), {}, 404),
            ("GET", f"/v1/{RUN}/nothing", {}, 404),
            ("GET", origin.blob(origin.shards[0]), {"Range": "bytes=999999999-"}, 416),
            ("GET", origin.blob(origin.shards[0]), {"If-None-Match": "*"}, 304),
            ("GET", origin.blob(origin.shards[1]), {}, 200),
        ]:
            await wire.ask(path, method, headers)
            assert (await wire.answer(method=method)).status == status


RANGES = [
    ("bytes=0-0", 0, 1),
    ("bytes=0-", 0, SHARD),
    ("bytes=100-199", 100, 200),
    ("bytes=-1", SHARD - 1, SHARD),
    ("bytes=-999999999", 0, SHARD),
    (f"bytes={SHARD - 1}-", SHARD - 1, SHARD),
    ("bytes=5-999999999", 5, SHARD),
    ("BYTES=7-9", 7, 10),
]


@pytest.mark.parametrize(("header", "start", "stop"), RANGES)
async def test_single_range(origin: Origin, header: str, start: int, stop: int) -> None:
    path = origin.blob(origin.shards[0])
    whole = (await http(origin.url, path)).body
    answer = await http(origin.url, path, headers={"Range": header})
    assert answer.status == 206
    assert answer.body == whole[start:stop]
    assert answer["Content-Range"] == f"bytes {start}-{stop - 1}/{SHARD}"
    assert answer["ETag"] == f'"blake3-{origin.shards[0]}"'


@pytest.mark.parametrize(
    "header", ["bytes=2-1", "bytes=a-b", "bytes=0-1,3-4", "lines=0-1", "bytes", "", "bytes=-"]
)
async def test_a_range_that_is_not_understood_gets_the_whole(origin: Origin, header: str) -> None:
    answer = await http(origin.url, origin.blob(origin.shards[0]), headers={"Range": header})
    assert answer.status == 200
    assert len(answer.body) == SHARD


@pytest.mark.parametrize("header", [f"bytes={SHARD}-", "bytes=-0", "bytes=9999999999999999-"])
async def test_a_range_outside_is_416(origin: Origin, header: str) -> None:
    answer = await http(origin.url, origin.blob(origin.shards[0]), headers={"Range": header})
    assert answer.status == 416
    assert answer["Content-Range"] == f"bytes */{SHARD}"


async def test_if_range_needs_exactly_our_etag(origin: Origin) -> None:
    digest = origin.shards[0]
    for etag, status in [
        (f'"blake3-{digest}"', 206),
        (f'W/"blake3-{digest}"', 200),
        ('"other"', 200),
        ("Mon, 30 Nov 2026 10:00:00 GMT", 200),
    ]:
        headers = {"Range": "bytes=1-2", "If-Range": etag}
        assert (await http(origin.url, origin.blob(digest), headers=headers)).status == status


async def test_conditions_on_blobs(origin: Origin) -> None:
    digest = origin.shards[0]
    good = f'"blake3-{digest}"'
    for name, value, status in [
        ("If-None-Match", good, 304),
        ("If-None-Match", f'"x", W/{good}', 304),
        ("If-None-Match", '"x"', 200),
        ("If-Match", good, 200),
        ("If-Match", '"x"', 412),
        ("If-Match", f"W/{good}", 412),
    ]:
        answer = await http(origin.url, origin.blob(digest), headers={name: value})
        assert (name, value, answer.status) == (name, value, status)
        if status == 304:
            assert answer["ETag"] == good


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("/v1", 404),
        ("/v1/", 404),
        ("/v1/runs/head", 404),
        ("/v1/status/head", 404),
        ("/v1/unknown/head", 404),
        ("/v1/UPPER/head", 400),
        ("/v1/-bad/head", 400),
        ("/v1/%2e%2e/head", 400),
        ("/v1/a%2fb/head", 400),
        (f"/v1/{'x' * 65}/head", 400),
        (f"/v1/{RUN}/head/", 404),
        (f"/v1/{RUN}/blobs/{'0' * 63}.bin", 400),
        (f"/v1/{RUN}/blobs/{'A' * 64}.bin", 400),
        (f"/v1/{RUN}/blobs/{'0' * 64}", 400),
        (f"/v1/{RUN}/blobs/../head", 404),
        (f"/v1/{RUN}/head?after=x", 400),
        (f"/v1/{RUN}/head?after=1&wait=-1", 400),
        (f"/v1/{RUN}/head?after=99999999999999999999&wait=1", 400),
    ],
)
async def test_bad_paths_get_a_short_json_error(origin: Origin, path: str, status: int) -> None:
    answer = await http(origin.url, path)
    assert answer.status == status
    assert answer["Cache-Control"] == "no-store"
    assert answer["Content-Type"] == "application/json"
    assert answer.body.startswith(b'{"error":')
    assert len(answer.body) < 400


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", f"/v1/{RUN}/head", "GET, HEAD, PUT"),
        ("POST", f"/v1/{RUN}/blobs/{'0' * 64}.bin", "GET, HEAD, PUT"),
        ("GET", f"/v1/{RUN}/missing", "POST"),
        ("PUT", "/v1/runs", "GET, HEAD"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("PATCH", "/v1/status", "GET, HEAD"),
    ],
)
async def test_other_methods_are_405(origin: Origin, method: str, path: str, allow: str) -> None:
    answer = await http(origin.url, path, method, body=b"")
    assert answer.status == 405
    assert answer["Allow"] == allow


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n",
        b"GET http://other/v1/runs HTTP/1.1\r\nHost: other\r\n\r\n",
    ],
)
async def test_garbage_never_makes_a_500_or_a_trace(origin: Origin, garbage: bytes) -> None:
    async with Wire(origin.url) as wire:
        await wire.send(garbage + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = await wire.rest()
    assert b" 500 " not in said
    assert b"Traceback" not in said
    assert (await http(origin.url, "/healthz")).status == 200


async def test_via_is_appended(origin: Origin) -> None:
    answer = await http(origin.url, "/healthz", headers={"Via": "1.1 proxy"})
    assert answer["Via"].startswith("1.1 proxy, 1.1 shardcast-")


async def test_long_poll_ends_at_once_for_a_newer_head(origin: Origin) -> None:
    first = await http(origin.url, f"/v1/{RUN}/head")
    sequence = 2 * 10**12 // 2  # below any real one: answered at once
    answer = await http(origin.url, f"/v1/{RUN}/head?after={sequence}&wait=25")
    assert answer.body == first.body
    async with Wire(origin.url) as wire:
        await wire.ask(f"/v1/{RUN}/head?after={10**15}&wait=1")
        assert (await wire.answer()).body == first.body  # the time was up
    waiting = asyncio.create_task(
        http(origin.url, f"/v1/{RUN}/head?after={_sequence(first.body)}&wait=25")
    )
    await asyncio.to_thread(
        publish, origin.store, origin.source, {"model.safetensors": noise(SHARD, 9)}
    )
    answer = await waiting  # within PATIENCE_S: before the wait is over
    # The newest head or one of an open version before it.
    assert _sequence(answer.body) > _sequence(first.body)


def _sequence(envelope: bytes) -> int:
    from shardcast.protocol.envelope import open_unverified
    from shardcast.protocol.head import decode_head

    return decode_head(open_unverified(envelope)[1]).sequence


async def test_an_unknown_run_is_found_when_it_appears(origin: Origin, tmp_path: Path) -> None:
    assert (await http(origin.url, "/v1/other/head")).status == 404
    await asyncio.to_thread(
        lambda: publish(origin.store, tmp_path / "other", {"a": b"x"}, run="other")
    )
    await wait_head(origin.url, "other")
    listed = await http(origin.url, "/v1/runs")
    assert b'"runs":["other","policy"]' in listed.body


async def test_a_head_that_no_known_key_signed_is_not_served(origin: Origin) -> None:
    before = await http(origin.url, f"/v1/{RUN}/head")
    (origin.store / RUN / "head.json").write_bytes(make_head(make_version(2), key=2))

    async def noticed() -> bool:
        return b"trusted" in (await http(origin.url, "/v1/status")).body

    await eventually(noticed, what="the problem in status")
    assert (await http(origin.url, f"/v1/{RUN}/head")).body == before.body


async def test_only_what_a_head_reaches_is_served(origin: Origin) -> None:
    data = b"somebody's own bytes"
    store = Store(origin.store)
    store.run(RUN).write_blob(digest_of(data), data)
    store.close()
    assert (await http(origin.url, origin.blob(digest_of(data)))).status == 404


async def test_a_file_changed_on_disk_is_never_served(origin: Origin) -> None:
    path = origin.store / RUN / "versions" / "000001" / "a.safetensors"
    digest = origin.shards[1 if len(origin.shards) > 1 else 0]
    with path.open("r+b") as file:
        file.seek(SHARD + 5)
        file.write(b"\0\1\2\3")
    wanted = [d for d in origin.shards if d != digest]
    statuses = {d: (await http(origin.url, origin.blob(d))).status for d in origin.shards}
    bad = [d for d, status in statuses.items() if status == 404]
    assert len(bad) == 1
    assert wanted
    status = await http(origin.url, "/v1/status")
    assert b'"damaged":"version 1, a.safetensors' in status.body


async def test_a_file_that_was_touched_is_not_hashed_on_the_event_loop(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is up to 16 MiB, perhaps on a slow disk: nobody else would be answered meanwhile."""
    path = origin.store / RUN / "versions" / "000001" / "a.safetensors"
    on_loop: list[bool] = []
    real = VersionDirectory.xxh3

    def xxh3(self: VersionDirectory, name: str, offset: int, length: int) -> bytes | None:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return real(self, name, offset, length)

    monkeypatch.setattr(VersionDirectory, "xxh3", xxh3)
    for digest in origin.shards:
        assert (await http(origin.url, origin.blob(digest))).status == 200
    os.utime(path, ns=(1, 1))
    for digest in origin.shards:
        assert digest_of((await http(origin.url, origin.blob(digest))).body) == digest
    assert on_loop
    assert not any(on_loop)


async def test_a_body_that_says_it_is_compressed_is_not_inflated(
    origin: Origin, caplog: pytest.LogCaptureFixture
) -> None:
    async with Wire(origin.url) as wire:
        await wire.send(
            f"POST /v1/{RUN}/missing HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
            "Content-Length: 5\r\n\r\nhello".encode()
        )
        assert (await wire.reader.readuntil(b"\r\n")).split()[1] == b"403"
    assert (await http(origin.url, "/healthz")).status == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_service_endpoints(origin: Origin) -> None:
    assert (await http(origin.url, "/healthz")).status == 200
    assert (await http(origin.url, "/readyz")).status == 200
    metrics = await http(origin.url, "/metrics")
    assert b"shardcast_requests_total" in metrics.body
    assert origin.manifest.encode() not in metrics.body
    peers = await http(origin.url, f"/v1/{RUN}/peers")
    assert peers.status == 200
    status = await http(origin.url, "/v1/status")
    assert b'"role":"origin"' in status.body


@pytest.mark.parametrize("listen", ["[::1]:0", "localhost:0", "[::]:0"])
async def test_listens_on_ipv6_and_ipv4(tmp_path: Path, listen: str) -> None:
    async with running(config(tmp_path / "s", listen=listen)) as url:
        assert (await http(url, "/healthz")).status == 200
        if listen == "[::]:0":
            port = url.rsplit(":", 1)[1]
            assert (await http(f"http://127.0.0.1:{port}", "/healthz")).status == 200


async def test_an_origin_with_a_pinned_key_ignores_the_remembered_one(tmp_path: Path) -> None:
    await asyncio.to_thread(publish, tmp_path / "s", tmp_path / "c", {"a": b"x"})
    pinned = config(tmp_path / "s", pubkeys=(signer(2).public_key,))
    async with running(pinned) as url:

        async def noticed() -> bool:
            return b"trusted" in (await http(url, "/v1/status")).body

        await eventually(noticed)
        assert (await http(url, f"/v1/{RUN}/head")).status == 404


@pytest.mark.parametrize("value", [b"\xff\xfe", b"1.1 " + b"x" * 3000, "1.1 pröxy".encode()])
async def test_a_strange_via_is_not_repeated(origin: Origin, value: bytes) -> None:
    async with Wire(origin.url) as wire:
        await wire.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nVia: " + value + b"\r\n\r\n")
        answer = await wire.answer()
    assert answer.status == 200
    assert answer["Via"].startswith("1.1 shardcast-")


@pytest.mark.parametrize("path", [f"/v1/{RUN}/head", "/healthz", "/v1/runs", "/v1/status"])
async def test_head_requests_of_json(origin: Origin, path: str) -> None:
    async with Wire(origin.url) as wire:
        await wire.ask(path, "HEAD")
        answer = await wire.answer(method="HEAD")
        assert answer.status == 200
        assert int(answer["Content-Length"]) > 0
        await wire.ask("/healthz")
        assert (await wire.answer()).status == 200
