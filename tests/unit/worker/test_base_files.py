"""What a frame may read of its base, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcast.base_files import BaseFiles
from shardcast.delta_reports import DeltaReports
from shardcast.errors import IntegrityError, MalformedError, NetworkError
from shardcast.events import WorkerEvent
from shardcast.frames import Arena, decoded
from shardcast.protocol.head import VersionRef
from shardcast.rebuilding import DeltaFailure
from shardcast.store.run import RunStore
from shardcast.store.stored import StoredVersion
from tests.fakes import KIB, FakeRun, RunServer
from tests.unit.worker.conftest import QUICK, some_bytes

A, B = some_bytes(300 * KIB, 1), some_bytes(10, 2)


@pytest.fixture
def base(tmp_path: Path) -> StoredVersion:
    from shardcast.worker import Worker

    run = FakeRun()
    run.publish({"a": A, "none": b"", "b": B})
    with RunServer(run) as server:
        Worker(tmp_path, run.name, [server.url], keys=run.keys, config=QUICK).pull()
    stored = RunStore(tmp_path, run.name).stored(1)
    assert stored is not None
    return stored


def reader(base: StoredVersion | None, arena: int = 400 * KIB) -> BaseFiles:
    return BaseFiles(base, memoryview(bytearray(arena)))


def test_ranges_are_the_files_bytes(base: StoredVersion) -> None:
    files = reader(base)
    assert files.range(0, 5, 299 * KIB) == A[5 : 5 + 299 * KIB]
    assert files.range(2, 0, 10) == B
    assert not files.range(1, 0, 0)
    assert files.touched == {0, 1, 2}
    files.close()


def test_ranges_beyond_the_arena_are_right_too(base: StoredVersion) -> None:
    files = reader(base, 10)
    assert [bytes(files.range(0, at, 8)) for at in (0, 8)] == [A[:8], A[8:16]]
    files.close()


@pytest.mark.parametrize(
    ("file", "offset", "length"),
    [(3, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 300 * KIB, 1), (0, 0, 1 << 60), (1, 0, 1), (0, 5, -1)],
)
def test_ranges_outside_are_refused(
    base: StoredVersion, file: int, offset: int, length: int
) -> None:
    with pytest.raises(MalformedError):
        reader(base).range(file, offset, length)


def test_a_copy_starts_from_nothing() -> None:
    with pytest.raises(MalformedError):
        reader(None).range(0, 0, 1)


def test_what_is_not_here_is_a_gap(base: StoredVersion) -> None:
    base.discard(1, "a test")
    files = reader(base)
    assert files.range(0, 0, 256 * KIB) == A[: 256 * KIB]
    with pytest.raises(IntegrityError):
        files.range(0, 255 * KIB, 2 * KIB)
    assert files.gap
    files.close()


def test_what_is_no_frame_says_why(base: StoredVersion) -> None:
    data, problem = decoded(memoryview(b"nonsense"), 10, reader(base), Arena())
    assert not data
    assert "frame" in problem


def test_a_frame_for_more_than_frames_hold_takes_no_memory(base: StoredVersion) -> None:
    data, problem = decoded(memoryview(b"nonsense"), 1 << 60, reader(base), Arena())
    assert not data
    assert "the most" in problem


def test_ranges_of_the_next_frame_take_the_same_room(base: StoredVersion) -> None:
    files = reader(base, 100 * KIB)
    first = files.range(0, 0, 100 * KIB)
    files.rewind()
    second = files.range(0, 150 * KIB, 100 * KIB)
    assert first == second == A[150 * KIB : 250 * KIB]
    files.close()


def test_reports_name_each_cause_once() -> None:
    told: list[WorkerEvent] = []
    reports = DeltaReports("policy", told.append)
    wrong = MalformedError("the publisher's frame is wrong: nonsense")
    reports.tell(
        [
            DeltaFailure(2, 1, (5,), wrong),
            DeltaFailure(2, 1, (3, 4), wrong),
            DeltaFailure(2, 1, tuple(range(10, 40, 2)), IntegrityError("damaged", source="/disk")),
            DeltaFailure(2, None, (7,), NetworkError("gone")),
        ]
    )
    texts = [str(event.error) for event in told]
    assert len(texts) == 3
    assert texts[0].startswith("version 2, shards 3-5: the delta from version 1")
    assert "24 and 7 more ranges" in texts[1]
    assert texts[1].endswith("(/disk)")
    assert texts[2].startswith("version 2, shard 7: a compressed copy")


def test_refusals_are_told_once_for_each_version() -> None:
    told: list[WorkerEvent] = []
    reports = DeltaReports("policy", told.append)
    for number in range(300):
        ref = VersionRef(
            version=number + 1, step=None, manifest=f"{number:064x}", bytes=1, deltas=[]
        )
        reports.refused(ref, MalformedError("no delta"))
        reports.refused(ref, MalformedError("no delta"))
    assert [event.version for event in told] == list(range(1, 301))
