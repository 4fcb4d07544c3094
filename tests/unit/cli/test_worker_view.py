"""A worker's events as lines and as JSON."""

import json
from pathlib import Path

import pytest

from shardcast.cli.output import EVENT_MEMBERS, Output
from shardcast.cli.progress import LineMeters
from shardcast.cli.worker_view import WorkerView
from shardcast.errors import EngineError, IntegrityError, NetworkError
from shardcast.events import EventKind, WorkerEvent
from tests.clock import Clock


def event(kind: EventKind, **members: object) -> WorkerEvent:
    return WorkerEvent(kind=kind, run="policy", t=1700000000000, **members)  # type: ignore[arg-type]


def view(out: Output, clock: Clock, every_s: float = 1.0) -> WorkerView:
    return WorkerView(out, LineMeters(out, every_s, clock))


LIFE = (
    event(EventKind.HEAD, version=4),
    event(EventKind.STARTED, version=4, step=40, bytes_done=0, bytes_total=1000),
    event(EventKind.PROGRESS, version=4, bytes_done=400, bytes_total=1000),
    event(
        EventKind.READY,
        version=4,
        step=40,
        manifest="ab" * 32,
        path=Path("/out/state/staging/000004"),
        bytes_fetched=1000,
    ),
    event(
        EventKind.COMMITTED,
        version=4,
        step=40,
        manifest="ab" * 32,
        path=Path("/out/versions/000004"),
        bytes_fetched=1000,
    ),
)


def test_json_events_carry_every_member_the_design_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(0.0)
    shown = view(Output(json=True), clock)
    for one in LIFE:
        shown.on_event(one)
        clock.now += 2
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in events] == ["head", "progress", "ready", "committed"]
    for one in events[2:]:
        assert set(EVENT_MEMBERS) | {"event", "t"} == set(one)
        assert (one["run"], one["version"], one["step"]) == ("policy", 4, 40)
        assert (one["manifest"], one["bytes_fetched"]) == ("ab" * 32, 1000)
    assert events[2]["t"] == 1700000000000
    assert events[3]["path"] == "/out/versions/000004"
    assert (events[1]["bytes"], events[1]["bytes_total"]) == (400, 1000)


def test_errors_name_code_message_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(Output(json=True), Clock(0.0))
    shown.on_event(event(EventKind.ERROR, error=NetworkError("gone", source="http://a")))
    shown.on_event(event(EventKind.SOURCE, source="http://b", error=NetworkError("slow")))
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["event"], first["code"], first["message"], first["source"]) == (
        "error",
        "network",
        "gone",
        "http://a",
    )
    assert (second["event"], second["source"]) == ("source", "http://b")


def test_people_see_ready_and_committed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(0.0)
    shown = view(Output(), clock)
    for one in LIFE:
        shown.on_event(one)
        clock.now += 2
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("ready      policy version 4 (step 40) after")
    assert "1.00 kB fetched" in captured.out
    assert captured.out.endswith("committed  policy version 4 (step 40): /out/versions/000004\n")
    assert "policy version 4: 400 B of 1.00 kB (40 %)" in captured.err


def test_a_source_that_is_down_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(Output(), Clock(0.0))
    for _ in range(5):
        shown.on_event(event(EventKind.SOURCE, source="http://b", error=NetworkError("refused")))
    assert capsys.readouterr().err == "http://b: refused\n"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (EventKind.HELD, "holds activations"),
        (EventKind.SUPERSEDED, "left for a newer one"),
        (EventKind.FROZEN, "expired"),
        (EventKind.THAWED, "fresh head"),
        (EventKind.DAMAGED, "fetched again"),
        (EventKind.BANNED, "http://b"),
        (EventKind.ERROR, "wrong bytes"),
    ],
)
def test_what_people_should_know_is_said(
    capsys: pytest.CaptureFixture[str], kind: EventKind, said: str
) -> None:
    shown = view(Output(), Clock(0.0))
    error = None if kind is EventKind.FROZEN else IntegrityError("wrong bytes")
    shown.on_event(event(kind, version=4, source="http://b", error=error))
    assert said in capsys.readouterr().err


ENGINE = "http://127.0.0.1:8000"
ACTIVATED = event(
    EventKind.ACTIVATED, version=4, step=40, manifest="ab" * 32, engine=ENGINE, pause_ms=83.0
)
ADAPTER = event(EventKind.ACTIVATED, version=4, engine=ENGINE, model="math/policy/4/ab")
FAILED = event(EventKind.ENGINE_FAILED, engine=ENGINE, error=EngineError("it broke", source=ENGINE))


def test_what_engines_do_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(Output(), Clock(0.0))
    for one in (event(EventKind.STAGED, version=4, engine=ENGINE), ACTIVATED, ADAPTER, FAILED):
        shown.on_event(one)
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"activated  policy version 4 (step 40): {ENGINE}, paused 83 ms",
        f"activated  policy version 4: {ENGINE}, as model math/policy/4/ab",
    ]
    assert said.err.splitlines() == [
        f"staged     policy version 4: {ENGINE}",
        f"warning: it broke ({ENGINE})",
    ]


def test_what_becomes_of_a_version_that_an_engine_calls_damaged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path("/out/versions/000004")
    repaired = event(EventKind.REPAIRED, version=4, path=path, bytes_fetched=2_000_000)
    right = EngineError(f"every byte of version 4 in {path} is right", source=ENGINE)
    for made in (Output(), Output(json=True)):
        shown = view(made, Clock(0.0))
        shown.on_event(repaired)
        shown.on_event(event(EventKind.INTACT, version=4, path=path, engine=ENGINE, error=right))
    said = capsys.readouterr()
    first, second, *_ = said.err.splitlines()
    assert first == f"repaired   policy version 4: {path}, 2.00 MB fetched"
    assert second.startswith("warning: every byte of version 4")
    told = [json.loads(line) for line in said.out.splitlines()]
    assert [one["event"] for one in told] == ["repaired", "intact"]
    assert (told[0]["path"], told[0]["bytes_fetched"]) == (str(path), 2_000_000)
    assert (told[1]["engine"], told[1]["code"]) == (ENGINE, "engine")


def test_what_engines_do_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(Output(json=True), Clock(0.0))
    for one in (ACTIVATED, ADAPTER, FAILED):
        shown.on_event(one)
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(first) == {*EVENT_MEMBERS, "event", "t", "engine", "pause_ms"}
    assert (first["engine"], first["pause_ms"]) == (ENGINE, 83.0)
    assert (second["model"], second["pause_ms"]) == ("math/policy/4/ab", None)
    assert (third["event"], third["code"], third["engine"]) == ("engine_failed", "engine", ENGINE)
    assert third["message"] == "it broke"
