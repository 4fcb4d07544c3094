"""What an agent's metrics say of an engine, as whoever scrapes them reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from shardcast.engine.driver import Target
from shardcast.engine.forms import EngineState, Served, Staged
from shardcast.engine.metrics import EngineMetrics
from shardcast.engine.reports import Reports
from shardcast.errors import EngineRefusedError
from shardcast.events import WorkerEvent
from tests.engines import make_version

URL = "http://one:8000"
GAUGES = (
    "reachable", "ready", "paused", "poisoned", "nonfinite", "served_version", "staged_version",
    "lag_versions",
)  # fmt: skip
AWAY = {"reachable": 0.0, "ready": 0.0}


@dataclass
class Scraped:
    """An agent's metrics."""

    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics("policy"))

    def sample(self, name: str, engine: str = URL, **labels: str) -> float | None:
        """Return one line's value, None where there is no such line."""
        shown = ",".join(f'{key}="{value}"' for key, value in {"engine": engine, **labels}.items())
        text = generate_latest(self.metrics.registry).decode()
        pattern = rf"^shardcast_engine_{name}{re.escape('{' + shown + '}')} (\S+)$"
        (*found,) = re.findall(pattern, text, re.MULTILINE)
        assert len(found) <= 1
        return float(found[0]) if found else None

    def gauges(self, engine: str = URL) -> dict[str, float]:
        """Return what is there of an engine."""
        found = {name: self.sample(name, engine) for name in GAUGES}
        return {name: value for name, value in found.items() if value is not None}


def state(run: str | None = "policy", served: int | None = 4, **changes: Any) -> EngineState:
    made = EngineState(
        engine="vllm",
        engine_version="0",
        plugin_version="0",
        run=run,
        served=None if served is None else Served(version=served, digest="a" * 64, since=1),
        ready=True,
    )
    return msgspec.structs.replace(made, **changes)


def staged(version: int, run: str = "policy") -> Staged:
    return Staged(run=run, version=version, digest="b" * 64, path="/v", since=1)


SERVES = {
    "reachable": 1.0, "ready": 1.0, "paused": 0.0, "poisoned": 0.0, "nonfinite": 0.0,
    "served_version": 4.0, "staged_version": 0.0, "lag_versions": 3.0,
}  # fmt: skip
UNKNOWN = {name: value for name, value in SERVES.items() if name != "lag_versions"}
NAN = Served(version=4, digest="a" * 64, since=1, nonfinite="w holds NaN at [3]")


@pytest.mark.parametrize(
    ("said", "newest", "shown"),
    [
        (state(), 7, SERVES),
        (state(), 4, SERVES | {"lag_versions": 0.0}),
        (state(), 3, SERVES | {"lag_versions": 0.0}),  # the head that was read is older
        (state(), None, UNKNOWN),
        (state(staged=staged(6)), 7, SERVES | {"staged_version": 6.0}),
        (state(staged=staged(6, "another")), 7, SERVES),
        (state(paused=True, ready=False), 7, SERVES | {"paused": 1.0, "ready": 0.0}),
        (state(served=None, run=None), 7, UNKNOWN | {"served_version": 0.0}),
        (state(run="another"), 7, UNKNOWN | {"served_version": 0.0}),
        (
            state(poisoned=True, paused=True, ready=False),
            7,
            UNKNOWN | {"poisoned": 1.0, "paused": 1.0, "ready": 0.0, "served_version": 0.0},
        ),
        (state(served=None, run="policy"), 7, UNKNOWN | {"served_version": 0.0}),
    ],
)
def test_what_an_engine_says_is_shown_whatever_it_said_before(
    said: EngineState, newest: int | None, shown: dict[str, float]
) -> None:
    fresh, other = Scraped(), Scraped()
    other.metrics.seen(URL, state(served=2, paused=True, poisoned=False, staged=staged(3)), 9)
    for scraped in (fresh, other):
        scraped.metrics.seen(URL, said, newest)
        assert scraped.gauges() == shown


def test_nan_that_is_served_is_shown() -> None:
    scraped = Scraped()
    scraped.metrics.seen(URL, msgspec.structs.replace(state(), served=NAN), 7)
    assert scraped.gauges() == SERVES | {"nonfinite": 1.0}


def test_of_an_engine_that_does_not_answer_nothing_old_is_shown() -> None:
    scraped = Scraped()
    scraped.metrics.seen(URL, state(paused=True, poisoned=True, staged=staged(6)), 7)
    scraped.metrics.seen("http://two", state(), 7)
    for _ in range(2):
        scraped.metrics.seen(URL, None, 7)
        assert scraped.gauges() == AWAY
    assert scraped.gauges("http://two") == SERVES
    scraped.metrics.seen(URL, state(), 7)
    assert scraped.gauges() == SERVES


def test_an_engine_that_never_answered_is_shown_as_away() -> None:
    scraped = Scraped()
    assert scraped.gauges() == {}
    scraped.metrics.seen(URL, None, None)
    assert scraped.gauges() == AWAY


def test_how_long_and_how_often_is_counted(tmp_path: Path) -> None:
    scraped, events = Scraped(), list[WorkerEvent]()
    reports = Reports(URL, "policy", events.append, scraped.metrics)
    target: Target = make_version(tmp_path, 1)
    for seconds in (0.3, 4.0):
        reports.staged(target, seconds)
    reports.activated(target.identity, 10, 80.0)
    reports.activated(target.identity, 10, None)  # somebody else activated: nobody knows how long
    reports.failed(EngineRefusedError("no", phase="load", reason="failed"), "load", target)

    assert scraped.sample("stage_seconds_count") == 2
    assert scraped.sample("stage_seconds_sum") == pytest.approx(4.3)
    assert scraped.sample("stage_seconds_bucket", le="0.25") == 0
    assert scraped.sample("stage_seconds_bucket", le="0.5") == 1
    assert scraped.sample("stage_seconds_bucket", le="5.0") == 2
    assert scraped.sample("pause_seconds_count") == 1
    assert scraped.sample("pause_seconds_sum") == pytest.approx(0.08)
    assert scraped.sample("pause_seconds_bucket", le="0.05") == 0
    assert scraped.sample("pause_seconds_bucket", le="0.1") == 1
    assert scraped.sample("activations_total") == 2
    assert scraped.sample("failures_total", phase="load") == 1
    assert (scraped.sample("failure_timestamp_seconds", phase="load") or 0) > 1e9
