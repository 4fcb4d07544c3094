"""A total deadline: whatever a pull waits for, and what its error says."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from shardcast.errors import NetworkError, UsageError
from shardcast.events import EventKind, WorkerEvent
from tests.fakes import KIB, Action, FakeRun, Gone, Request, RunServer, Unaccepting
from tests.tree import contents_of
from tests.unit.worker.conftest import with_config
from tests.unit.worker.test_pull import worker

PATIENT = with_config(
    read_timeout_s=30.0, header_timeout_s=30.0, give_up_after_s=30.0, connect_timeout_s=30.0,
    lag_s=30.0, silent_s=30.0, head_grace_s=0.05,
)  # fmt: skip
"""Only the deadline ends a pull."""


def test_it_says_what_is_missing_and_keeps_what_is_here(
    tmp_path: Path, run: FakeRun, server: RunServer
) -> None:
    held = 1
    withheld = run.shard_digests(1)[0]
    server.fault = lambda request, data: [Gone()] if request.digest == withheld else None
    pull = worker(tmp_path / "out", run, server, config=PATIENT, deadline_s=1.5)
    with pytest.raises(NetworkError) as caught:
        pull.pull()
    total = sum(map(len, run.files[1].values()))
    here = total - 256 * KIB * held
    message = caught.value.message
    assert "version 1 of run 'policy' did not come within 1.5 s" in message
    assert f"{held} of 9 shards are missing" in message
    assert f"{server.url}: no failure, it is still being waited for" in message
    assert caught.value.source == server.url
    assert f"{here} of {total} bytes are here" in message
    assert caught.value.exit_code == 13
    assert not (tmp_path / "out" / "current").exists()
    server.fault = lambda request, data: None
    update = worker(tmp_path / "out", run, server, config=PATIENT, deadline_s=20).pull()
    assert contents_of(update.path) == run.files[1]
    assert update.bytes_fetched == 256 * KIB * held  # nothing was lost


def test_a_source_that_fails_is_named(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    with RunServer(run) as other:
        withheld = run.shard_digests(1)[0]

        def fault(request: Request, data: bytes) -> Iterable[Action] | None:
            return [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"] if (
                request.digest == withheld
            ) else None  # fmt: skip

        server.fault = other.fault = fault
        with pytest.raises(NetworkError) as caught:
            worker(tmp_path / "out", run, server, other, config=PATIENT, deadline_s=1.0).pull()
    assert "1 of 9 shards are missing" in caught.value.message
    assert f"{server.url}: answers 500" in caught.value.message
    assert f"{other.url}: answers 500" in caught.value.message


def test_no_head_in_time(tmp_path: Path, run: FakeRun) -> None:
    with Unaccepting() as hole, pytest.raises(NetworkError) as caught:
        worker(tmp_path / "out", run, hole.url, config=PATIENT, deadline_s=0.5).pull()
    assert "no acceptable head came within 0.5 s" in caught.value.message
    assert f"{hole.url}: " in caught.value.message


def test_no_documents_in_time(tmp_path: Path, run: FakeRun, server: RunServer) -> None:
    server.fault = lambda request, data: [Gone()]
    with pytest.raises(NetworkError) as caught:
        worker(tmp_path / "out", run, server, config=PATIENT, deadline_s=0.5).pull()
    assert "documents that describe it are missing" in caught.value.message


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_deadline_is_a_time(tmp_path: Path, run: FakeRun, seconds: float) -> None:
    with pytest.raises(UsageError, match="deadline"):
        worker(tmp_path / "out", run, "http://127.0.0.1:1", deadline_s=seconds)


# --- sources that give no head ----------------------------------------------------------------


@pytest.mark.parametrize("dead", ["refuses", "never accepts"])
def test_a_dead_source_is_not_asked_for_any_shard(
    tmp_path: Path, run: FakeRun, server: RunServer, dead: str
) -> None:
    """The head that did not come from it says enough: no shard waits for it."""
    events: list[WorkerEvent] = []

    class Log:
        def on_event(self, event: WorkerEvent) -> None:
            events.append(event)

    with Unaccepting() as hole, RunServer(run) as gone:
        gone.close()
        url = gone.url if dead == "refuses" else hole.url
        pull = worker(tmp_path / "out", run, url, server, config=PATIENT, observer=Log())
        update = pull.pull()
    assert contents_of(update.path) == run.files[1]
    blamed = [event for event in events if event.kind is EventKind.SOURCE]
    assert len(blamed) <= 1  # for its head
    assert all("blob" not in str(event.error) for event in blamed)
    needed = sum(map(len, run.blobs.values()))
    assert update.bytes_fetched == needed
