import contextlib
import json

import pytest

from shardcast.cli.output import Output, table
from shardcast.errors import DiskError, StallError


def test_without_json_an_event_is_silent_and_results_go_to_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Output()
    out.event("ready", run="r")
    out.result("a result")
    out.notice("a notice")
    out.detail("a detail")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert captured.err == "a notice\n"


def test_with_json_stdout_carries_events_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Output(json=True, clock=lambda: 1700000000123)
    out.result("a result")
    out.notice("a notice")
    out.version_event("ready", run="r", version=3)
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [
        {
            "event": "ready",
            "t": 1700000000123,
            "run": "r",
            "version": 3,
            "step": None,
            "manifest": None,
            "path": None,
            "bytes_fetched": None,
        }
    ]
    assert captured.err == ""


def test_an_error_is_one_sentence_and_with_json_an_event_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Output(json=True, run="r").error(StallError("no byte for 15 s", source="http://relay"))
    captured = capsys.readouterr()
    event = json.loads(captured.out)
    assert (event["event"], event["run"]) == ("error", "r")
    assert (event["code"], event["message"], event["source"]) == (
        "stall",
        "no byte for 15 s",
        "http://relay",
    )
    assert captured.err == "error: no byte for 15 s (http://relay)\n"


def test_quiet_keeps_results_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(quiet=True)
    out.notice("a notice")
    out.warning("look here")
    out.result("a result")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a result\n", "warning: look here\n")


def test_verbose_shows_details(capsys: pytest.CaptureFixture[str]) -> None:
    Output(verbose=True).detail("a detail")
    assert capsys.readouterr().err == "a detail\n"


def test_a_table_aligns_numbers_right_and_text_left_and_cuts_nothing() -> None:
    long = "x" * 300
    text = table(("name", "bytes", "ok"), [("a", 5, True), (long, 12345, None), ("c", "", False)])
    lines = text.splitlines()
    assert lines[0].split() == ["NAME", "BYTES", "OK"]
    assert lines[1].split() == ["a", "5", "yes"]
    assert lines[2].startswith(long)
    assert lines[3].split() == ["c", "-", "no"]
    assert lines[1].index("5") == lines[2].index("12345") + 4


def test_a_table_without_rows_is_its_titles() -> None:
    assert table(("name", "bytes"), []) == "NAME  BYTES"


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result("a\x1b[2Jb\rc\x9bd\te\nf")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\x0dc\\x9bd\te\nf\n"


def test_a_name_that_is_no_text_is_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result("caf\udce9")
    assert capsys.readouterr().out == "caf\\udce9\n"


def test_a_closed_stream_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    out = Output()
    out.result("a")
    out.error(StallError("b"))
    assert not out.terminal


def test_a_full_disk_behind_stdout_is_a_disk_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(DiskError, match="standard output"):
            Output().result("a")
        monkeypatch.setattr("sys.stderr", full)
        Output().notice("nobody can read this")
        Output(json=True).error(StallError("b"))
        with contextlib.suppress(OSError):
            full.close()
