"""Runs every scenario and judges it: `python -m loadtest.gates [--quick] [NAME ...]`.

A check fails when it misses its limit, or, if it is a ratio, when it is worse than the baseline
in git by more than the tolerance. A scenario that fails is run again, up to four times. The outcome of each scenario goes to `loadtest/results/`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.processes import ProcessError, Processes, scratch, terminate_as_exit

SCENARIOS = (
    "codec",
    "cut_through",
    "stream",
    "announce",
    "publish",
    "relay_cpu",
    "worker_cpu",
    "recycle",
    "materialize",
    "skip_deltas",
    "memory",
    "overload",
    "sources",
    "distribute",
)

LONG = ("follow_steps", "slow_link", "headline")
"""Only by name, and in full runs: minutes of waiting for slow cables each. They need root."""

_HERE = Path(__file__).resolve().parent
BASELINES = _HERE / "baselines.json"
RESULTS = _HERE / "results"

# Bounds for a single scenario; all quick ones together take less than 8 minutes.
_TIMEOUT_S = {True: 240.0, False: 1200.0}

# Other work on a shared machine makes a program slower, never faster: what passes once of five
# runs is within its limit. A real regression misses all five.
TRIES = 5

Row = tuple[str, str, str, str, str, str]
_HEADER: Row = ("scenario", "check", "value", "limit", "baseline", "verdict")


def run_scenario(name: str, *, quick: bool, work: Path | None) -> dict[str, Any]:
    """Run one scenario in its own process and return its report.

    A scenario that crashes or cannot run is a report too, one that did not pass.
    """
    argv = [sys.executable, "-m", f"loadtest.{name}", *(["--quick"] if quick else [])]
    if work is not None:
        argv += ["--work", str(work)]
    with scratch("gates-") as logs, Processes(logs) as processes:
        process = processes.start(argv, name=name)
        try:
            process.wait(timeout=_TIMEOUT_S[quick])
        except ProcessError as error:
            return {"scenario": name, "passed": False, "unavailable": str(error)}
        for line in process.events():
            if line.get("scenario") == name:
                return line
        return {"scenario": name, "passed": False, "unavailable": process.describe("no report")}


def judge(report: dict[str, Any], baselines: dict[str, Any], mode: str) -> list[Row]:
    """Return a table row for each check; the last column is ok, MISSED, WORSE or FAILED."""
    name = str(report["scenario"])
    if "unavailable" in report:
        return [(name, "(did not run)", "", "", "", "FAILED")]
    known = baselines.get(mode, {}).get(name, {})
    tolerance = float(baselines.get("tolerance", {}).get("ratio", 0.0))
    rows = []
    for check in report["checks"]:
        base = known.get(check["name"])
        verdict = "ok"
        if not check["passed"]:
            verdict = "MISSED"
        elif base is not None and check["unit"] == "ratio" and worse(check, base, tolerance):
            verdict = "WORSE"
        sign = ">=" if check["at_least"] else "<="
        rows.append(
            (name, check["name"], f"{check['value']:.3g} {check['unit']}",
             f"{sign} {check['limit']:g}", "-" if base is None else f"{base:.3g}", verdict)
        )  # fmt: skip
    return rows


def try_scenario(
    name: str, quick: bool, work: Path | None, baselines: dict[str, Any], mode: str
) -> tuple[dict[str, Any], list[Row]]:
    """Run a scenario until it passes, at most `TRIES` times; return the last run, judged."""
    attempt = 1
    while True:
        report = run_scenario(name, quick=quick, work=work)
        rows = judge(report, baselines, mode)
        seconds = report.get("seconds", "?")
        print(f"{name}, run {attempt}: {seconds} s", file=sys.stderr, flush=True)
        if attempt == TRIES or all(row[-1] == "ok" for row in rows):
            return report, rows
        print(table(rows), file=sys.stderr, flush=True)
        attempt += 1


def worse(check: dict[str, Any], baseline: float, tolerance: float) -> bool:
    """Say whether a check is worse than its baseline by more than the tolerance."""
    value = float(check["value"])
    if check["at_least"]:
        return value < baseline / (1 + tolerance)
    return value > baseline * (1 + tolerance)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    widths = [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_HEADER, *rows)
    ]
    return "\n".join(lines)


def remember(
    baselines: dict[str, Any], reports: Sequence[dict[str, Any]], mode: str
) -> dict[str, Any]:
    """Return the baselines with this run's values in place of the old ones."""
    values = dict(baselines.get(mode, {}))
    environment = baselines.get("environment", {})
    for report in reports:
        if "unavailable" not in report:
            checks = {check["name"]: round(check["value"], 4) for check in report["checks"]}
            values[report["scenario"]] = checks
            environment = report["environment"]
    return {**baselines, "environment": environment, mode: values}


def main() -> None:
    """Run the scenarios; exit 1 when a gate is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*SCENARIOS, *LONG)))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 8 minutes")
    parser.add_argument("--work", type=Path, help="where scenarios write; default: /dev/shm")
    parser.add_argument("--update-baselines", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - {*SCENARIOS, *LONG}:
        parser.error(f"unknown scenario: {', '.join(sorted(unknown))}")
    mode = "quick" if options.quick else "full"
    baselines: dict[str, Any] = json.loads(BASELINES.read_text(encoding="utf-8"))
    RESULTS.mkdir(exist_ok=True)
    reports: list[dict[str, Any]] = []
    rows: list[Row] = []
    with terminate_as_exit():
        for name in options.names or (SCENARIOS if options.quick else (*SCENARIOS, *LONG)):
            report, judged = try_scenario(name, options.quick, options.work, baselines, mode)
            text = json.dumps(report, indent=2) + "\n"
            (RESULTS / f"{name}.{mode}.json").write_text(text, encoding="utf-8")
            if "unavailable" in report:
                print(f"{name}: {report['unavailable']}", file=sys.stderr)
            reports.append(report)
            rows += judged
    print(table(rows))
    if options.update_baselines:
        text = json.dumps(remember(baselines, reports, mode), indent=2) + "\n"
        BASELINES.write_text(text, encoding="utf-8")
    missed = sum(row[-1] != "ok" for row in rows)
    print(f"{len(rows) - missed} passed, {missed} failed")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
