"""Real pulls over loopback, from servers that a test can spoil."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcast import plan_work
from shardcast.errors import (
    BusyError,
    ClockError,
    DiskError,
    DiskFullError,
    EquivocationError,
    ExpiredError,
    IntegrityError,
    MixAndMatchError,
    NetworkError,
    NotFoundError,
    RollbackError,
    ShardcastError,
    StateError,
    UnknownKeyError,
    UnsafePathError,
    UsageError,
    WithdrawnError,
)
from shardcast.events import EventKind
from shardcast.protocol.digest import digest_of
from shardcast.protocol.documents import encode
from shardcast.protocol.layout import FileEntry, Layout, encode_part
from shardcast.protocol.manifest import encode_manifest
from shardcast.store import files as store_files
from shardcast.store.run import RunStore
from shardcast.store.stored import Durability
from shardcast.worker import Update, Worker
from tests.fakes import KIB, Action, Close, FakeRun, Gone, Request, RunServer, response
from tests.observer import Log
from tests.tree import contents_of
from tests.unit.worker.conftest import QUICK, some_bytes, with_config

SHARD = 256 * KIB


def worker(out: Path, run: FakeRun, *servers: RunServer | str, **options: Any) -> Worker:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    trust: dict[str, Any] = {} if "first_use" in options else {"keys": run.keys}
    return Worker(
        out,
        run.name,
        urls,
        durability=Durability.NONE,
        **{"config": QUICK, **trust, **options},
    )


def assert_is(update: Update, run: FakeRun, version: int) -> None:
    assert update.version == version
    assert contents_of(update.path) == run.files[version]
    current = update.path.parent.parent / "current"
    assert current.resolve() == update.path


def shards_sent(*servers: RunServer, run: FakeRun, version: int) -> Counter[str]:
    """How many body bytes of a version's shards were sent, by digest."""
    digests = set(run.shard_digests(version))
    total: Counter[str] = Counter()
    for server in servers:
        total += Counter({d: n for d, n in server.sent.items() if d in digests})
    return total


# --- what a pull brings -----------------------------------------------------------------------


def test_the_newest_version_arrives_byte_for_byte(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    log = Log()
    update = worker(tmp_path / "out", run, server, observer=log).pull()
    assert_is(update, run, 1)
    assert update.step == 10
    assert run.head is not None
    assert update.manifest == run.head.versions[0].manifest
    assert update.head == run.head
    assert update.path.is_absolute()
    documents = 3
    assert len(server.blob_requests) == documents + len(set(run.shard_digests(1)))
    assert update.bytes_fetched == sum(server.sent.values())
    assert log.kinds() == ["head", "started", "ready", "committed"]
    ready, committed = log.of(EventKind.READY)[0], log.of(EventKind.COMMITTED)[0]
    assert ready.bytes_total == sum(map(len, files.values()))
    assert committed.path == update.path
    assert committed.bytes_fetched == update.bytes_fetched
    assert (committed.version, committed.step) == (1, 10)
    assert (tmp_path / "out" / "head.json").read_bytes() == run.envelope


@pytest.mark.parametrize(
    "size", [0, 1, SHARD - 1, SHARD, SHARD + 1, 2 * SHARD], ids=lambda size: f"{size}B"
)
def test_sizes_around_a_shard(tmp_path: Path, size: int) -> None:
    run = FakeRun()
    run.publish({"model.safetensors": some_bytes(size), "empty": b""})
    with RunServer(run) as server:
        assert_is(worker(tmp_path / "out", run, server).pull(), run, 1)


def test_two_sources_share_the_work(
    tmp_path: Path, run: FakeRun, servers: tuple[RunServer, RunServer]
) -> None:
    update = worker(tmp_path / "out", run, *servers).pull()
    assert_is(update, run, 1)
    assert all(server.blob_requests for server in servers)
    sent = shards_sent(*servers, run=run, version=1)
    assert sum(sent.values()) == sum(len(data) for data in run.files[1].values())


def test_shards_with_the_same_bytes_are_fetched_once(tmp_path: Path) -> None:
    run = FakeRun()
    zeros = bytes(4 * SHARD)
    run.publish({"a": zeros, "b": zeros, "c": b"tail"})
    with RunServer(run) as server:
        assert_is(worker(tmp_path / "out", run, server).pull(), run, 1)
        assert sum(shards_sent(server, run=run, version=1).values()) == SHARD + 4


def test_a_version_by_number_and_by_manifest(tmp_path: Path, run: FakeRun) -> None:
    second = run.publish({"model": some_bytes(9)})
    first = run.head.versions[1] if run.head else second
    with RunServer(run) as server:
        assert_is(worker(tmp_path / "a", run, server).pull(version=1), run, 1)
        assert_is(worker(tmp_path / "b", run, server).pull(manifest=first.manifest), run, 1)
        assert_is(worker(tmp_path / "c", run, server).pull(), run, 2)


def test_a_manifest_that_no_head_lists_is_pulled_if_a_source_has_it(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    ref = run.add_version(7, {"old": some_bytes(300_000)}, step=3)
    update = worker(tmp_path / "out", run, server).pull(manifest=ref.manifest)
    assert_is(update, run, 7)
    assert update.step == 3


def test_a_manifest_that_no_source_has(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    with pytest.raises(NetworkError, match="the manifest " + "0" * 64):
        worker(tmp_path / "out", run, server).pull(manifest="0" * 64)


def test_a_version_that_is_not_retained_is_not_found(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    with pytest.raises(NotFoundError, match="retained: 1"):
        worker(tmp_path / "out", run, server).pull(version=5)


def test_an_unknown_run_is_not_found(tmp_path: Path, server: RunServer) -> None:
    other = FakeRun("other")
    with pytest.raises(NotFoundError, match=f"'other': {server.url}"):
        worker(tmp_path / "out", other, server).pull()


def test_a_run_without_a_version_yet(tmp_path: Path) -> None:
    run = FakeRun()
    run.amend()
    with RunServer(run) as server, pytest.raises(NotFoundError, match="no complete version"):
        worker(tmp_path / "out", run, server).pull()


@pytest.mark.parametrize(
    "arguments", [{"version": 1, "manifest": "0" * 64}, {"manifest": "xyz"}], ids=["both", "junk"]
)
def test_arguments_that_make_no_sense(
    tmp_path: Path, run: FakeRun, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        worker(tmp_path / "out", run, "http://127.0.0.1:1").pull(**arguments)


@pytest.mark.parametrize("options", [{"keep": 0}, {"sources": []}, {"run": "../x"}])
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Worker(**{"out": tmp_path, "run": "policy", "sources": ["http://x"], **options})


async def test_pull_inside_a_loop_says_what_to_use(tmp_path: Path, run: FakeRun) -> None:
    with pytest.raises(UsageError, match="apull"):
        worker(tmp_path / "out", run, "http://127.0.0.1:1").pull()


def test_a_plain_file_server_will_do(tmp_path: Path, run: FakeRun) -> None:
    with RunServer(run, static=True) as server:
        assert_is(worker(tmp_path / "out", run, server).pull(), run, 1)


# --- what is here already ---------------------------------------------------------------------


def test_a_version_that_is_here_is_returned_at_once(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    first = worker(tmp_path / "out", run, server).pull()
    server.requests.clear()
    log = Log()
    again = worker(tmp_path / "out", run, server, observer=log).pull()
    assert replace(again, bytes_fetched=first.bytes_fetched) == first
    assert again.bytes_fetched == 0
    assert server.blob_requests == []
    assert log.kinds() == ["head"]


def test_unchanged_files_and_shards_come_from_the_version_before(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    before = worker(tmp_path / "out", run, server).pull()
    name = "model-00001-of-00002.safetensors"
    changed = bytearray(files[name])
    changed[SHARD + 5] ^= 1
    run.publish({**files, name: bytes(changed), "renamed/vocab.txt": files["tokenizer/vocab.txt"]})
    server.sent.clear()
    update = worker(tmp_path / "out", run, server).pull()
    assert_is(update, run, 2)
    assert sum(shards_sent(server, run=run, version=2).values()) == SHARD
    for path in ("model-00002-of-00002.safetensors", "renamed/vocab.txt"):
        assert (update.path / path).stat().st_nlink > 1
    assert (update.path / name).stat().st_ino != (before.path / name).stat().st_ino
    assert contents_of(before.path) == run.files[1]


def test_back_to_an_older_version_without_the_network(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    worker(tmp_path / "out", run, server).pull()
    run.publish({**files, "config.json": b"{}"})
    worker(tmp_path / "out", run, server).pull()
    server.requests.clear()
    assert_is(worker(tmp_path / "out", run, server).pull(version=1), run, 1)
    assert server.blob_requests == []


def test_old_versions_go_when_newer_ones_are_committed(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    for number in range(2, 6):
        worker(out, run, server, keep=2).pull()
        run.publish({"model": some_bytes(300_000, number)})
    worker(out, run, server, keep=2).pull()
    assert sorted(path.name for path in (out / "versions").iterdir()) == ["000004", "000005"]
    documents = set(RunStore(out, "policy").blobs())
    assert run.head is not None
    named = {ref.manifest for ref in run.head.versions if ref.version in (4, 5)}
    assert named <= documents


def test_a_version_with_a_reader_stays(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    from shardcast.store.locks import shared_lock

    out = tmp_path / "out"
    first = worker(out, run, server, keep=1).pull()
    run.publish({"model": some_bytes(9)})
    with shared_lock(first.path):
        worker(out, run, server, keep=1).pull()
        assert contents_of(first.path) == run.files[1]
    run.publish({"model": some_bytes(10)})
    worker(out, run, server, keep=1).pull()
    assert [path.name for path in (out / "versions").iterdir()] == ["000003"]


def test_a_damaged_source_on_this_disk_falls_back_to_the_network(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    out, name = tmp_path / "out", "model-00001-of-00002.safetensors"
    before = worker(out, run, server).pull()
    data = bytearray(files[name])
    data[10] ^= 1
    (before.path / name).write_bytes(data)
    run.publish({**files, "config.json": b"new"})
    server.sent.clear()
    log = Log()
    update = worker(out, run, server, observer=log).pull()
    assert_is(update, run, 2)
    assert sum(shards_sent(server, run=run, version=2).values()) == SHARD + 3
    damaged = log.of(EventKind.DAMAGED)
    assert [event.version for event in damaged] == [1]
    assert name in str(damaged[0].error)


@pytest.mark.parametrize("where", ["opening", "reading"])
def test_a_source_is_not_damaged_because_this_process_cannot_read(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    out, name = tmp_path / "out", "model-00001-of-00002.safetensors"
    before = worker(out, run, server).pull()
    inode, read, opened = (before.path / name).stat().st_ino, store_files.read_into, os.open
    run.publish({**files, name: files[name] + b"more"})  # so that it is copied, not linked

    def no_memory(fd: int, buffer: memoryview, offset: int) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return read(fd, buffer, offset)

    def no_descriptor(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path) == name and not flags & os.O_RDWR:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        if where == "reading":
            patch.setattr(plan_work, "read_into", no_memory)
        else:
            patch.setattr(os, "open", no_descriptor)
        with pytest.raises(DiskError):
            worker(out, run, server).pull()
    store = RunStore(out, run.name)
    stored = store.stored(1)
    assert stored is not None
    assert (stored.damaged, stored.missing()) == (None, [])
    store.close()
    log = Log()
    assert_is(worker(out, run, server, observer=log).pull(), run, 2)
    assert not log.of(EventKind.DAMAGED)


@pytest.mark.parametrize("how", ["flipped", "zeroed", "truncated", "gone"])
def test_a_committed_version_that_was_damaged_is_repaired(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes], how: str
) -> None:
    out, name = tmp_path / "out", "model-00001-of-00002.safetensors"
    path = worker(out, run, server).pull().path / name
    data = bytearray(files[name])
    if how == "flipped":
        data[-1] ^= 1
        path.write_bytes(data)
    elif how == "zeroed":
        path.write_bytes(data[:-4096] + bytes(4096))
    elif how == "truncated":
        os.truncate(path, SHARD + 1)
    else:
        path.unlink()
    server.sent.clear()
    assert_is(worker(out, run, server).pull(), run, 1)
    sent = sum(shards_sent(server, run=run, version=1).values())
    assert sent == {"truncated": 3 * SHARD, "gone": len(data)}.get(how, SHARD)


# --- resume -----------------------------------------------------------------------------------


def interrupted(out: Path, run: FakeRun, server: RunServer, after: int) -> int:
    """Pull until the server has given `after` shards and dies; return the bytes of shards sent."""
    shards = set(run.shard_digests(1))
    given: set[str] = set()

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest not in shards:
            return None
        if len(given) >= after:
            return [response(200, data[:-1], length=len(data)), Close()]
        given.add(request.digest)
        return None

    server.fault = fault
    with pytest.raises(NetworkError, match="no source delivered shard"):
        worker(out, run, server, config=with_config(give_up_after_s=0.4)).pull()
    last = server.connections  # what still comes over these was asked for by the one that ended
    server.fault = lambda request, data: (
        fault(request, data) if request.connection <= last else None
    )
    return sum(shards_sent(server, run=run, version=1).values())


def test_a_pull_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    interrupted(out, run, server, after=5)
    assert not (out / "current").exists()
    update = worker(out, run, server).pull()
    assert_is(update, run, 1)
    total = sum(len(data) for data in run.files[1].values())
    assert sum(shards_sent(server, run=run, version=1).values()) == total
    assert server.blob_requests.count(update.manifest) == 1


def test_shards_of_an_unfinished_version_serve_the_next(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    sent = interrupted(out, run, server, after=5)
    run.publish({**files, "config.json": b"{}"})
    server.sent.clear()
    assert_is(worker(out, run, server).pull(), run, 2)
    total = sum(len(data) for data in run.files[2].values())
    again = sum(shards_sent(server, run=run, version=2).values())
    assert again <= total - sent + len(files["config.json"])
    assert RunStore(out, "policy").staged() == []


@pytest.mark.parametrize("how", ["zeroed", "truncated", "gone", "another version's"])
def test_a_journal_that_was_lost_costs_hashing_not_fetching(
    tmp_path: Path, run: FakeRun, server: RunServer, how: str
) -> None:
    out = tmp_path / "out"
    interrupted(out, run, server, after=5)
    journal = out / "state" / "000001.shards"
    data = journal.read_bytes()
    if how == "zeroed":
        journal.write_bytes(bytes(len(data)))
    elif how == "truncated":
        journal.write_bytes(data[:30])
    elif how == "gone":
        journal.unlink()
    else:
        journal.write_bytes(data[:8] + bytes(32) + data[40:])
    assert_is(worker(out, run, server).pull(), run, 1)
    total = sum(len(data) for data in run.files[1].values())
    assert sum(shards_sent(server, run=run, version=1).values()) == total


@pytest.mark.parametrize("name", ["000001.json", "000001.shards"])
def test_lost_state_of_a_committed_version_costs_hashing_not_fetching(
    tmp_path: Path, run: FakeRun, server: RunServer, name: str
) -> None:
    out = tmp_path / "out"
    worker(out, run, server).pull()
    (out / "state" / name).write_bytes(b"")
    server.sent.clear()
    assert_is(worker(out, run, server).pull(), run, 1)
    assert sum(shards_sent(server, run=run, version=1).values()) == 0


def test_staged_bytes_that_changed_are_fetched_again(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    before = interrupted(out, run, server, after=5)
    staged = RunStore(out, "policy").stored(1)
    assert staged is not None
    shard = min(staged.present())
    extent = staged.version.layout.extent(shard)
    with (staged.directory / extent.path).open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"power cut")
    staged.close()
    log = Log()
    assert_is(worker(out, run, server, observer=log).pull(), run, 1)
    total = sum(len(data) for data in run.files[1].values())
    again = sum(shards_sent(server, run=run, version=1).values()) - before
    assert again == total - before + extent.length
    assert [event.version for event in log.of(EventKind.DAMAGED)] == [1]


# --- sources that fail ------------------------------------------------------------------------


def test_a_wrong_blob_bans_its_source_and_the_report_names_it(
    tmp_path: Path, run: FakeRun, servers: tuple[RunServer, RunServer]
) -> None:
    good, bad = servers
    shards = set(run.shard_digests(1))

    def poison(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest not in shards:
            return None
        return [response(200, b"x" * len(data))]

    bad.fault = poison
    log = Log()
    update = worker(tmp_path / "out", run, good, bad, observer=log).pull()
    assert_is(update, run, 1)
    banned = log.of(EventKind.BANNED)
    assert {event.source for event in banned} == {bad.url}
    assert all(isinstance(event.error, IntegrityError) for event in banned)
    assert len([d for d in bad.blob_requests if d in shards]) <= QUICK.connections_per_source


def test_only_wrong_blobs_end_it_soon_as_an_integrity_error_that_names_all(
    tmp_path: Path, run: FakeRun, servers: tuple[RunServer, RunServer]
) -> None:
    for server in servers:
        server.fault = lambda request, data: [response(200, b"x" * len(data))]
    patient = with_config(give_up_after_s=600)
    with pytest.raises(IntegrityError, match=servers[0].url) as caught:
        worker(tmp_path / "out", run, *servers, config=patient).pull()
    assert servers[1].url in caught.value.message
    assert not (tmp_path / "out" / "versions").exists()


def test_a_bit_that_flips_once_at_the_only_source_is_fetched_again(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    victim = run.shard_digests(1)[2]
    flipped: list[str] = []

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest != victim or flipped:
            return None
        flipped.append(victim)
        return [response(200, bytes([data[0] ^ 1]) + data[1:])]

    server.fault = fault
    assert_is(worker(tmp_path / "out", run, server).pull(), run, 1)
    assert server.blob_requests.count(victim) == 2


def test_a_dead_source_does_not_matter(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    log = Log()
    dead = "http://127.0.0.1:1"
    assert_is(worker(tmp_path / "out", run, dead, server, observer=log).pull(), run, 1)
    assert dead in {event.source for event in log.of(EventKind.SOURCE)}


def test_nothing_but_dead_sources(tmp_path: Path, run: FakeRun) -> None:
    dead = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    config = with_config(give_up_after_s=0.3)
    with pytest.raises(NetworkError) as caught:
        worker(tmp_path / "out", run, *dead, config=config).pull()
    assert all(url in caught.value.message for url in dead)


def test_storms_of_every_status_are_weathered(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    """Each blob is refused once in every way before it is given."""
    refusals = [
        response(500, b"oops"),
        response(503, b"", {"Retry-After": "0"}),
        response(503, b"", {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        response(429, b""),
        response(404, b""),
    ]
    seen: Counter[str] = Counter()

    def fault(request: Request, data: bytes) -> Iterable[Action] | None:
        assert request.digest is not None
        seen[request.digest] += 1
        count = seen[request.digest]
        return [refusals[count - 1]] if count <= len(refusals) else None

    server.fault = fault
    config = with_config(give_up_after_s=20)
    assert_is(worker(tmp_path / "out", run, server, config=config).pull(), run, 1)
    assert set(seen.values()) == {len(refusals) + 1}


def test_a_stalled_source_is_overtaken(
    tmp_path: Path, run: FakeRun, servers: tuple[RunServer, RunServer]
) -> None:
    good, stalled = servers
    shards = set(run.shard_digests(1))

    def stall(request: Request, data: bytes) -> Iterable[Action] | None:
        if request.digest not in shards:
            return None
        return [
            *stalled.good(request, data)[:0],
            response(200, data[:10], length=len(data)),
            Gone(),
        ]

    stalled.fault = stall
    config = with_config(read_timeout_s=20, rate_window_s=20)
    update = worker(tmp_path / "out", run, good, stalled, config=config).pull()
    assert_is(update, run, 1)


def test_a_blob_cut_short_everywhere_is_put_together_from_both(
    tmp_path: Path, run: FakeRun, servers: tuple[RunServer, RunServer]
) -> None:
    """No source ever sends more than 100 kB at once; ranges bring it home."""

    def cut(server: RunServer) -> None:
        def fault(request: Request, data: bytes) -> Iterable[Action] | None:
            whole = server.good(request, data)[0]
            assert isinstance(whole, bytes)
            head, _, body = whole.partition(b"\r\n\r\n")
            return [head + b"\r\n\r\n" + body[:100_000], Close()] if len(body) > 100_000 else None

        server.fault = fault

    for server in servers:
        cut(server)
    config = with_config(give_up_after_s=20)
    update = worker(tmp_path / "out", run, *servers, config=config).pull()
    assert_is(update, run, 1)
    assert update.bytes_fetched < 1.05 * sum(len(b) for b in run.blobs.values())


# --- trust ------------------------------------------------------------------------------------


def test_a_key_must_be_known(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    with pytest.raises(UsageError, match="--pubkey"):
        worker(tmp_path / "out", run, server, keys=()).pull()


def test_first_use_is_remembered(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    out = tmp_path / "out"
    assert_is(worker(out, run, server, first_use=True).pull(), run, 1)
    stranger = FakeRun()
    stranger.publish({"evil": b"x"})
    with RunServer(stranger) as other, pytest.raises(UnknownKeyError):
        worker(out, run, other, keys=()).pull()
    assert_is(worker(out, run, server, keys=()).pull(), run, 1)


def test_a_head_by_another_key_names_its_source(tmp_path: Path, run: FakeRun) -> None:
    stranger = FakeRun()
    stranger.publish({"evil": b"x"})
    with RunServer(stranger) as server, pytest.raises(UnknownKeyError) as caught:
        worker(tmp_path / "out", run, server).pull()
    assert caught.value.source == server.url
    assert not (tmp_path / "out" / "head.json").exists()


def test_one_bad_head_does_not_stop_the_others(tmp_path: Path, run: FakeRun) -> None:
    forged = FakeRun(signers=run.signers)
    forged.publish({"evil": b"x"})
    forged.envelope = forged.envelope.replace(b'"sig":"', b'"sig":"AAAA')[:-10] + b'"}]}'
    log = Log()
    with RunServer(run) as good, RunServer(forged) as bad:
        assert_is(worker(tmp_path / "out", run, bad, good, observer=log).pull(), run, 1)
    events = [event for event in log.of(EventKind.SOURCE) if event.source == bad.url]
    assert len(events) == 1


def test_a_rollback_is_refused_after_a_restart_and_names_its_source(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    old = run.envelope
    run.publish({**files, "config.json": b"{}"})
    worker(out, run, server).pull()
    run.envelope = old
    with pytest.raises(RollbackError) as caught:
        worker(out, run, server).pull()
    assert caught.value.source == server.url


def test_two_heads_of_one_sequence_are_refused_loudly(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    import msgspec

    out = tmp_path / "out"
    worker(out, run, server).pull()
    assert run.head is not None
    run.announce(msgspec.structs.replace(run.head, hold=True))
    with pytest.raises(EquivocationError):
        worker(out, run, server).pull()


def test_a_withdrawn_version_is_refused(
    tmp_path: Path, run: FakeRun, server: RunServer, files: dict[str, bytes]
) -> None:
    ref = run.publish({**files, "config.json": b"{}"})
    run.withdraw(2)
    with pytest.raises(WithdrawnError):
        worker(tmp_path / "out", run, server).pull(version=2)
    with pytest.raises(WithdrawnError):
        worker(tmp_path / "out", run, server).pull(manifest=ref.manifest)
    assert_is(worker(tmp_path / "out", run, server).pull(), run, 1)


def test_an_expired_head_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    run = FakeRun(expiry_ms=-1 + 1)
    run.now_ms = lambda: 1_700_000_000_000
    ref = run.publish({"model": some_bytes(10)})
    with RunServer(run) as server:
        with pytest.raises(ExpiredError, match="expired"):
            worker(tmp_path / "a", run, server).pull()
        assert_is(worker(tmp_path / "b", run, server, accept_expired=True).pull(), run, 1)
        assert_is(worker(tmp_path / "c", run, server).pull(manifest=ref.manifest), run, 1)


def test_a_wrong_clock_is_named(tmp_path: Path) -> None:
    """The publisher's and the source's clocks agree; by this machine's the head has expired."""
    run, long_ago_ms = FakeRun(expiry_ms=3_600_000), 1_700_000_000_000
    run.now_ms = lambda: long_ago_ms
    run.publish({"model": some_bytes(10)})
    with RunServer(run) as server:
        server.date_s = long_ago_ms / 1000 + 60
        with pytest.raises(ClockError, match="ahead of all its sources'"):
            worker(tmp_path / "a", run, server).pull()
    run = FakeRun()
    future_ms = run.now_ms() + 100 * 24 * 3_600_000
    run.now_ms = lambda: future_ms
    run.publish({"model": some_bytes(10)})
    with RunServer(run) as server:
        with pytest.raises(ClockError, match="this clock or the publisher's is wrong"):
            worker(tmp_path / "b", run, server).pull()
        server.date_s = future_ms / 1000
        with pytest.raises(ClockError, match="behind all its sources'"):
            worker(tmp_path / "b", run, server).pull()


def signed(run: FakeRun, number: int, layout: bytes, shards: list[str], total: int) -> None:
    """Announce a version with any layout at all, properly signed."""
    from shardcast.protocol import succession
    from shardcast.protocol.head import VersionRef

    layout_digest = digest_of(layout)
    part = encode_part(layout_digest, 0, shards)
    manifest = encode_manifest(layout_digest, [digest_of(part)])
    for data in (layout, part, manifest):
        run.blobs[digest_of(data)] = data
    ref = VersionRef(
        version=number, step=None, manifest=digest_of(manifest), bytes=total, deltas=[]
    )
    issue = succession.Issue(run=run.name, now_ms=run.now_ms(), keys=run.keys)
    run.announce(succession.with_version(run.head, issue, ref, keep=16))


def layout_of(run: str = "policy", version: int = 2, **changes: Any) -> Layout:
    values: dict[str, Any] = {
        "run": run,
        "version": version,
        "step": None,
        "lineage": "x",
        "created_at": 0,
        "shard_bytes": SHARD,
        "metadata": {},
        "files": [FileEntry(path="model", bytes=5)],
    }
    return Layout(**{**values, **changes})


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "a/../../b", "a\\b", "nul", "a\x00b"])
def test_a_path_that_leaves_the_directory_is_refused_before_anything_is_written(
    tmp_path: Path, run: FakeRun, server: RunServer, path: str
) -> None:
    import msgspec

    layout = layout_of(files=[FileEntry(path=path, bytes=5)])
    signed(run, 2, msgspec.json.encode(layout), [digest_of(b"12345")], 5)
    with pytest.raises(UnsafePathError):
        worker(tmp_path / "out", run, server).pull()
    assert not (tmp_path / "out" / "state" / "staging").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "layout",
    [layout_of(version=3), layout_of(files=[FileEntry(path="model", bytes=6)])],
    ids=["version", "size"],
)
def test_documents_that_do_not_belong_together_are_refused(
    tmp_path: Path, run: FakeRun, server: RunServer, layout: Layout
) -> None:
    signed(run, 2, encode(layout), [digest_of(b"12345")], 5)
    with pytest.raises(MixAndMatchError):
        worker(tmp_path / "out", run, server).pull()
    assert not (tmp_path / "out" / "state" / "staging").exists()


# --- the directory ----------------------------------------------------------------------------


def test_two_workers_on_one_directory(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    out = tmp_path / "out"
    held = pytest.raises(BusyError, match=f"process {os.getpid()}")
    with RunStore(out, "policy").lock(), held:
        worker(out, run, server).pull()
    assert_is(worker(out, run, server).pull(), run, 1)


def test_another_run_in_one_directory(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    worker(tmp_path / "out", run, server).pull()
    other = FakeRun("other")
    other.publish({"model": b"x"})
    with RunServer(other) as second, pytest.raises(UsageError, match="belongs to run 'policy'"):
        worker(tmp_path / "out", other, second).pull()


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    tmp_path: Path, run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((*real[:4], 3, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    total = sum(len(data) for data in run.files[1].values())
    with pytest.raises(DiskFullError, match=f"needs {total} bytes and {3 * real.f_frsize} are"):
        worker(tmp_path / "out", run, server).pull()
    assert not set(server.blob_requests) & set(run.shard_digests(1))


def test_other_unfinished_versions_make_room(
    tmp_path: Path,
    run: FakeRun,
    server: RunServer,
    files: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    interrupted(out, run, server, after=5)
    run.publish({**files, "config.json": b"{}"})
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((*real[:4], 3, *real[5:]))

    def statvfs(path: object) -> os.statvfs_result:
        return small if (out / "state" / "staging" / "000001").exists() else real

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert_is(worker(out, run, server).pull(), run, 2)


def test_a_started_number_is_never_used_for_other_content(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    worker(out, run, server).pull()
    again = FakeRun(signers=run.signers)
    again.publish({"other": b"content"})
    with RunServer(again) as other, pytest.raises(EquivocationError):
        worker(out, run, other).pull()


# --- cancellation -----------------------------------------------------------------------------


async def test_cancelling_a_pull_ends_threads_and_gives_the_lock_back(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    shards = set(run.shard_digests(1))
    server.fault = lambda request, data: [Gone()] if request.digest in shards else None
    patient = with_config(read_timeout_s=60, header_timeout_s=60, give_up_after_s=60)
    before = set(threading.enumerate())
    task = asyncio.create_task(worker(out, run, server, config=patient).apull())
    await asyncio.to_thread(server.wait_for, lambda: bool(shards & set(server.blob_requests)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("fetch-")]
    assert left == []
    server.fault = lambda request, data: None
    assert_is(await worker(out, run, server).apull(), run, 1)


async def test_cancelling_while_no_source_has_a_head(tmp_path: Path, run: FakeRun) -> None:
    log = Log()
    dead = "http://127.0.0.1:1"
    patient = with_config(give_up_after_s=60)
    pulling = worker(tmp_path / "out", run, dead, config=patient, observer=log).apull()
    task = asyncio.create_task(pulling)

    def told() -> bool:
        with log.changed:
            return log.changed.wait_for(lambda: bool(log.of(EventKind.SOURCE)), 10)

    assert await asyncio.to_thread(told)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


def test_an_error_of_any_kind_gives_the_lock_back(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        with pytest.raises(ShardcastError) as caught:
            worker(out, run, server).pull(version=9)
        assert not isinstance(caught.value, BusyError)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_something_in_the_place_of_current_is_told_before_anything_is_fetched(
    tmp_path: Path, run: FakeRun, server: RunServer, kind: str
) -> None:
    current = tmp_path / "out" / "current"
    current.parent.mkdir()
    current.mkdir() if kind == "directory" else current.touch()
    with pytest.raises(StateError, match=rf"{current} is a {kind}, .*: move it away"):
        worker(tmp_path / "out", run, server).pull()
    assert server.blob_requests == []
    assert current.exists()
    current.rmdir() if kind == "directory" else current.unlink()
    assert worker(tmp_path / "out", run, server).pull().version == 1


def test_a_source_of_wrong_bytes_is_named_once(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    server.fault = lambda request, data: [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + bytes(len(data))
    ]
    with pytest.raises(IntegrityError) as caught:
        worker(tmp_path / "out", run, server).pull()
    assert caught.value.message.count(server.url) == 1
