"""Small parts: configuration, cancellation, scans, the pool."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from shardcast.cancel import Cancel, TransferCancelledError
from shardcast.config import NetConfig
from shardcast.errors import NetworkError, UsageError
from shardcast.fetch import BlobSource, MemorySink, Transfer
from shardcast.protocol.digest import digest_of
from shardcast.pulling import FetchPool
from shardcast.scans import Scans
from shardcast.selector import Selector
from shardcast.store.run import RunStore
from shardcast.store.stored import ShardState
from tests.fakes import FakeRun, Gone, RunServer
from tests.unit.worker.conftest import QUICK, with_config
from tests.unit.worker.test_pull import worker

# --- configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["connect_timeout_s", "read_timeout_s", "connections_per_source", "give_up_after_s"]
)
def test_bounds_that_bound_nothing_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        NetConfig(**{name: 0})


def test_the_buffer_must_hold_a_head() -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        NetConfig(chunk_bytes=1024)


# --- cancellation -----------------------------------------------------------------------------


def test_hooks_run_once_and_only_while_in_effect() -> None:
    cancel, called = Cancel(), list[str]()
    with cancel.hook(lambda: called.append("over")):
        pass
    with cancel.hook(lambda: called.append("in effect")):
        cancel.cancel()
        cancel.cancel()
    with cancel.hook(lambda: called.append("late")):
        pass
    assert called == ["in effect", "late"]
    with pytest.raises(TransferCancelledError):
        cancel.check()


def test_a_child_is_cancelled_with_its_parent_not_the_other_way() -> None:
    parent = Cancel()
    with parent.child() as first, parent.child() as second:
        first.cancel()
        assert (first.cancelled, second.cancelled, parent.cancelled) == (True, False, False)
        parent.cancel()
        assert second.cancelled
        assert second.wait(0)


# --- scans ------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path, run: FakeRun, server: RunServer) -> Path:
    worker(tmp_path / "out", run, server).pull()
    return tmp_path / "out"


def scanned(out: Path) -> tuple[bool, set[ShardState]]:
    """Scan in a fresh process, as it were; return the verdict and the states before."""
    store = RunStore(out, "policy")
    stored = store.stored(1)
    assert stored is not None
    whole = Scans(store).scan(1, Cancel())
    states = {stored.state(shard) for shard in range(stored.version.layout.shard_count)}
    store.close()
    return whole, states


def test_a_version_that_nobody_touched_is_not_hashed_again(committed: Path) -> None:
    assert scanned(committed) == (True, {ShardState.RECORDED})


@pytest.mark.parametrize("how", ["another boot", "touched", "no record", "damaged record"])
def test_a_version_is_hashed_after_a_boot_or_a_touch(
    committed: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = committed / "state" / "scanned.json"
    if how == "another boot":
        monkeypatch.setattr("shardcast.scans._boot_id", lambda: "another")
    elif how == "touched":
        next((committed / "versions" / "000001").glob("*.safetensors")).touch()
    elif how == "no record":
        record.unlink()
    else:
        record.write_bytes(b"{")
    assert scanned(committed) == (True, {ShardState.VERIFIED})
    assert scanned(committed) == (True, {ShardState.RECORDED})


def test_a_scan_finds_what_a_power_cut_left(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardcast.scans._boot_id", lambda: "another")
    path = committed / "versions" / "000001" / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes(100))
    whole, states = scanned(committed)
    assert not whole
    assert states == {ShardState.VERIFIED, ShardState.MISSING}


def test_a_file_that_changes_after_it_was_hashed_is_hashed_again(committed: Path) -> None:
    (committed / "state" / "scanned.json").unlink()
    store = RunStore(committed, "policy")
    scans = Scans(store)
    assert scans.scan(1, Cancel())
    path = committed / "versions" / "000001" / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    assert not scans.scan(1, Cancel())
    store.close()


def test_a_version_that_is_not_there_is_not_whole(tmp_path: Path) -> None:
    assert not Scans(RunStore(tmp_path, "policy")).scan(9, Cancel())


def test_a_scan_can_be_cancelled(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.scans._boot_id", lambda: "another")
    cancel = Cancel()
    cancel.cancel()
    with pytest.raises(TransferCancelledError):
        Scans(RunStore(committed, "policy")).scan(1, cancel)


# --- the pool ---------------------------------------------------------------------------------


@contextmanager
def pool(server: RunServer, cancel: Cancel, config: NetConfig = QUICK) -> Iterator[FetchPool]:
    selector = Selector([server.url], clock=time.monotonic, rng=random.Random(1))
    with BlobSource(server.url, config) as source:
        fetching = FetchPool("policy", {server.url: source}, selector, config, cancel)
        with fetching:
            yield fetching


def test_a_pool_takes_work_while_it_works(run: FakeRun, server: RunServer) -> None:
    got: dict[str, bytes] = {}
    digests = run.shard_digests(1)
    with pool(server, Cancel()) as fetching:

        def submit(digest: str) -> None:
            sink = MemorySink()

            def done(transfer: Transfer) -> None:
                got[transfer.digest] = bytes(sink.data)
                if digests:
                    submit(digests.pop())

            fetching.submit(digest, None, sink, name=digest, done=done)

        submit(digests.pop())
        while digests:
            time.sleep(0)
        fetching.finish()
        assert fetching.received_bytes == sum(map(len, got.values()))
        assert fetching.unverified_bytes == 0
    assert all(digest_of(data) == digest for digest, data in got.items())
    assert len(got) == len(set(run.shard_digests(1)))


def test_who_finishes_never_meets_a_thread_that_has_not_started(
    run: FakeRun, server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetching thread may submit more, and so start threads, while another one waits for all."""
    digests = run.shard_digests(1)
    early: list[threading.Thread] = []

    with pool(server, Cancel()) as fetching:

        class Watched(threading.Thread):
            def start(self) -> None:
                if self in fetching._threads:
                    early.append(self)
                super().start()

        monkeypatch.setattr(threading, "Thread", Watched)

        def more(_transfer: Transfer) -> None:
            for digest in digests[1:]:
                sink = MemorySink()
                fetching.submit(digest, None, sink, name=digest[:8], done=lambda _: None)

        fetching.submit(digests[0], None, MemorySink(), name="first", done=more)
        fetching.finish()
        assert len(fetching._threads) > 1
    assert early == []


def test_an_error_of_the_callers_own_code_ends_the_pool(run: FakeRun, server: RunServer) -> None:
    def done(transfer: Transfer) -> None:
        raise ZeroDivisionError

    with pool(server, Cancel()) as fetching:
        for digest in run.shard_digests(1):
            fetching.submit(digest, None, MemorySink(), name=digest, done=done)
        with pytest.raises(ZeroDivisionError):
            fetching.finish()


def test_leaving_a_pool_early_ends_its_threads(run: FakeRun, server: RunServer) -> None:
    server.fault = lambda request, data: [Gone()]
    patient = with_config(read_timeout_s=60, header_timeout_s=60)
    before = threading.active_count()
    digest = run.shard_digests(1)[0]
    with suppress(KeyError), pool(server, Cancel(), patient) as fetching:
        fetching.submit(digest, None, MemorySink(), name="x", done=lambda transfer: None)
        server.wait_for(lambda: bool(server.blob_requests))
        raise KeyError
    names = [t.name for t in threading.enumerate() if t.name.startswith("fetch-")]
    assert names == []
    assert threading.active_count() <= before + 2  # the server's own


def test_a_cancelled_pool_takes_nothing(run: FakeRun, server: RunServer, cancel: Cancel) -> None:
    cancel.cancel()
    with pool(server, cancel) as fetching:
        fetching.submit("0" * 64, None, MemorySink(), name="x", done=lambda transfer: None)
        with pytest.raises(TransferCancelledError):
            fetching.finish()


def test_a_pool_that_gives_up_names_the_blob(run: FakeRun, server: RunServer) -> None:
    with pool(server, Cancel(), with_config(give_up_after_s=0.2)) as fetching:
        fetching.submit("0" * 64, None, MemorySink(), name="the blob", done=lambda transfer: None)
        with pytest.raises(NetworkError, match=r"the blob .* answers 404"):
            fetching.finish()
