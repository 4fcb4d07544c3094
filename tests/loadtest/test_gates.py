"""The judge: limits, baselines, and scenarios that did not run."""

from typing import Any

import pytest

from loadtest import nginx
from loadtest.gates import judge, remember, table
from loadtest.scenario import Check

BASELINES: dict[str, Any] = {
    "tolerance": {"ratio": 0.25},
    "quick": {"relay_cpu": {"cost": 1.0, "times": 5.0, "peak": 10.0}},
}


def report(
    name: str, value: float, limit: float, unit: str = "ratio", **more: Any
) -> dict[str, Any]:
    check = Check(name, value, limit, unit, **more)
    return {
        "scenario": "relay_cpu",
        "checks": [
            {
                "name": name,
                "value": value,
                "limit": limit,
                "unit": unit,
                "at_least": check.at_least,
                "passed": check.passed,
            }
        ],
    }


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        (report("cost", 1.1, 1.2), "ok"),
        (report("cost", 1.3, 1.2), "MISSED"),
        (report("cost", 1.3, 2.0), "WORSE"),
        (report("cost", 0.2, 2.0), "ok"),
        (report("times", 4.5, 4.0, at_least=True), "ok"),
        (report("times", 3.9, 4.0, at_least=True), "MISSED"),
        (report("times", 3.9, 3.0, at_least=True), "WORSE"),
        (report("peak", 90.0, 100.0, "MB"), "ok"),  # only ratios compare across machines
        (report("unknown", 90.0, 100.0), "ok"),
        ({"scenario": "relay_cpu", "unavailable": "nginx is not installed"}, "FAILED"),
    ],
)
def test_verdicts(case: dict[str, Any], verdict: str) -> None:
    (row,) = judge(case, BASELINES, "quick")
    assert row[-1] == verdict
    assert verdict in table([row])


def test_new_baselines_replace_only_what_ran() -> None:
    fresh = {**report("cost", 0.5, 1.2), "environment": {"cores": 2}}
    gone = {"scenario": "publish", "unavailable": "no"}
    after = remember({**BASELINES, "full": {"x": {}}}, [fresh, gone], "quick")
    assert after["quick"] == {"relay_cpu": {"cost": 0.5}}
    assert after["full"] == {"x": {}}
    assert after["environment"] == {"cores": 2}


def test_the_nginx_recipe_still_has_what_is_replaced(tmp_path: Any) -> None:
    text = nginx.recipe("http://127.0.0.1:1234", tmp_path, 5678)
    assert "server 127.0.0.1:1234;" in text
    assert "example" not in text
