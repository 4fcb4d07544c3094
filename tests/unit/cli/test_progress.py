import json

import pytest

from shardcast.cli import progress
from shardcast.cli.output import Output
from tests.clock import Clock


def test_lines_come_now_and_then_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(100.0)
    meter = progress.LineMeters(Output(), 5.0, clock).start("publish x", 1_000_000)
    for second in range(11):
        clock.now = 100.0 + second
        meter.update(second * 50_000)
    meter.finish()
    assert capsys.readouterr().err.splitlines() == [
        "publish x: 250 kB of 1.00 MB (25 %), 50.0 kB/s, 15.0 s left",
        "publish x: 500 kB of 1.00 MB (50 %), 50.0 kB/s, 10.0 s left",
    ]


def test_what_was_there_at_the_start_does_not_count_as_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(100.0)
    meter = progress.LineMeters(Output(), 5.0, clock).start("pull", 1_000_000)
    meter.update(900_000)
    clock.now += 10
    meter.update(950_000)
    assert "5.00 kB/s, 10.0 s left" in capsys.readouterr().err


def test_with_json_progress_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(100.0)
    meter = progress.LineMeters(Output(json=True), 0.5, clock).start("pull", 1000, version=3)
    meter.update(0)
    clock.now += 2
    meter.update(500, 2000)
    event = json.loads(capsys.readouterr().out)
    assert event | {"t": 0} == {
        "event": "progress",
        "t": 0,
        "version": 3,
        "what": "pull",
        "bytes": 500,
        "bytes_total": 2000,
        "bytes_per_s": 250,
    }


def test_what_stands_still_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(100.0)
    meter = progress.LineMeters(Output(), 5.0, clock).start("pull", 1_000_000)
    for done in (0, 500_000, 500_000, 500_000, 500_000, 600_000, *[600_000] * 9):
        meter.update(done)
        clock.now += 5
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pull: 500 kB of 1.00 MB (50 %), 100 kB/s, 5.0 s left"
    assert lines[3] == "pull: 500 kB of 1.00 MB (50 %), nothing for 15.0 s"
    assert lines[4] == "pull: 600 kB of 1.00 MB (60 %), 10.0 kB/s, 40.0 s left"
    assert lines[-1] == "pull: 600 kB of 1.00 MB (60 %), nothing for 45.0 s"


def test_no_total_no_percentage(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(100.0)
    meter = progress.LineMeters(Output(), 5.0, clock).start("pull")
    clock.now += 5
    meter.update(1000)
    assert capsys.readouterr().err == "pull: 1.00 kB, -\n"


def test_bars_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress.meters(Output()), progress.LineMeters)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert isinstance(progress.meters(Output()), progress.BarMeters)
    assert isinstance(progress.meters(Output(json=True)), progress.LineMeters)
    assert isinstance(progress.meters(Output(quiet=True)), progress.LineMeters)


def test_bars_draw_bytes_rate_and_percentage_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.BarMeters() as bars:
        meter = bars.start("pull policy", 2_000_000)
        meter.update(500_000)
        meter.update(1_000_000, 2_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pull policy" in captured.err
    assert "MB" in captured.err


def test_a_counter_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.LineMeters(Output(json=True), 0.0, Clock(100.0))
    counter = progress.Counter(shown, "verify", run="r")
    counter.add(1)  # nothing to show yet
    counter.begin(10)
    counter.add(2)
    counter.add(3)
    counter.finish()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["bytes"] for event in events] == [3, 6]
    assert counter.done == 6
    assert counter.seconds >= 0
