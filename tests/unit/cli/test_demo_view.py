"""What the demonstration draws and says."""

import io
import json

import pytest
from rich.console import Console

from shardcast.cli import demo
from shardcast.cli.demo_view import LineView, LiveView
from shardcast.cli.output import Output
from shardcast.demo.scenario import VersionResult
from shardcast.errors import IntegrityError


def result(*, equal: bool = True) -> VersionResult:
    return VersionResult(
        version=2,
        bytes=1_000_000,
        changed=0.0096,
        publish_s=0.25,
        announced_ms=0,
        ready_s={"worker-1": 0.5, "worker-2": 2.0, "worker-3": 0.25},
        delta_bytes=4_000,
        fetched={"worker-1": 5_000, "worker-2": 4_500, "worker-3": 4_500},
        by_delta={"worker-1": 4_000, "worker-2": 4_000, "worker-3": 4_000},
        sent={"origin": 8_000},
        equal={"worker-1": True, "worker-2": equal, "worker-3": True},
        files=9,
    )


def drawn(view: LiveView) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(view.render())
    return stream.getvalue()


def test_the_tree_is_drawn_from_the_start() -> None:
    text = drawn(LiveView())
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1].startswith("origin")
    assert lines[-2].startswith("└─ worker-3")


def test_each_worker_s_progress_is_drawn() -> None:
    view = LiveView()
    view.doing("distributing version 2")
    view.joined("origin", "http://127.0.0.1:1")
    view.joined("worker-1", None)
    early = result()
    early.ready_s = {"worker-3": 0.25}
    view.published(early)
    view.progress("worker-1", 2, 500_000, 1_000_000)
    view.progress("worker-2", 1, 1, 1_000_000)  # of a version that is over
    text = drawn(view)
    assert "distributing version 2" in text
    assert "500 kB of 1.00 MB" in text
    assert "ready 250 ms, 4.50 kB fetched" in text
    view.ready("worker-1", result())
    view.compared(result())
    text = drawn(view)
    assert "published in 250 ms, last ready 2.0 s later, 5.00 kB a worker, 9 files equal" in text
    view.compared(result(equal=False))
    assert "NOT EQUAL" in drawn(view)


def test_lines_and_events_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for out in (Output(), Output(json=True)):
        view = LineView(out)
        view.doing("publishing")
        view.published(result())
        view.progress("worker-1", 2, 1, 2)
        view.ready("worker-2", result())
        view.compared(result(equal=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "version 2: published 1.00 MB in 250 ms, 0.96 % changed, 4.00 kB as a delta"
    assert lines[1] == "version 2: worker-2 ready 2.0 s after the announcement, 4.50 kB fetched"
    assert lines[2] == "version 2: worker-2 DIFFERS from the source"
    events = [json.loads(line) for line in lines[3:]]
    assert [event["event"] for event in events] == [
        "demo_published",
        "demo_ready",
        "demo_compared",
    ]
    assert events[0]["delta_bytes"] == events[1]["bytes_delta"] == 4_000


def test_the_report_measures_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    demo.report(Output(), [result()], 12.5)
    text = capsys.readouterr().out
    assert "WORKER-2" in text
    row = "2   0.96 %   250 ms  5.00 kB   200x  8.00 kB    500 ms     2.0 s    250 ms  yes"
    assert row in text
    assert "equal: 9 files of 1 version, byte for byte, on all 3 workers; 12.5 s" in text
    with pytest.raises(IntegrityError, match="worker-2"):
        demo.report(Output(), [result(equal=False)], 12.5)
    assert "equal:" not in capsys.readouterr().out


def test_a_version_that_nobody_has_yet_has_no_ratio() -> None:
    empty = VersionResult(version=1, bytes=10, changed=None, publish_s=0.1, announced_ms=0)
    assert (empty.wire_bytes, empty.ratio) == (0, None)
