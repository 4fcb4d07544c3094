"""Measures what a swap costs; see loadtest/README.md.

`python -m loadtest.swap [--quick] [--models 4M,50M,500M] [--repeats N] [--keep-freed]
[--work DIR] [--table FILE]`
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from loadtest.processes import scratch, terminate_as_exit
from loadtest.scenario import environment
from loadtest.swap.bench import bench
from loadtest.swap.engine import KEEP_FREED
from loadtest.swap.journey import measure_journeys
from loadtest.swap.models import SHAPES
from loadtest.swap.pauses import measure_pauses
from loadtest.swap.report import checks, tables


def main() -> None:
    """Measure one model after the other; print a JSON line, and exit 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description="What a swap costs a running vLLM.")
    parser.add_argument("--quick", action="store_true", help="the smallest model, once")
    parser.add_argument("--models", help=f"some of {','.join(SHAPES)}; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of two swaps each")
    parser.add_argument("--keep-freed", action="store_true", help=f"vLLM with {KEEP_FREED}")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"), help="where to write")
    parser.add_argument("--table", type=Path, help="write the tables to this file, too")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print(json.dumps({"scenario": "swap", "passed": False, "unavailable": "vllm"}))
        raise SystemExit(3)
    names = ["4M"] if options.quick else (options.models or ",".join(SHAPES)).split(",")
    began, results, conditions = time.monotonic(), [], {}
    with terminate_as_exit():
        for size in names:
            with scratch("loadtest-", options.work) as work:
                results.append(_measure(work, size, options))
                conditions = environment(work)
    judged = checks(results)
    report = {
        "scenario": "swap",
        "passed": all(check["passed"] for check in judged),
        "checks": judged,
        "models": results,
        "conditions": {
            "quick": options.quick,
            "repeats": 1 if options.quick else options.repeats,
            "variables": KEEP_FREED if options.keep_freed else {},
        },
        "environment": conditions,
        "seconds": round(time.monotonic() - began, 1),
    }
    text = tables(report)
    if options.table is not None:
        options.table.write_text(text)
    print(text)
    print(json.dumps(report), flush=True)
    raise SystemExit(0 if report["passed"] else 1)


def _measure(work: Path, size: str, options: argparse.Namespace) -> dict[str, Any]:
    repeats, quick = options.repeats, options.quick
    variables = KEEP_FREED if options.keep_freed else {}
    before = os.getloadavg()[0]
    _note(f"{size}: making models, starting vLLM")
    with bench(work, size, variables) as made:
        _note(f"{size}: pauses")
        pauses = measure_pauses(made, repeats=1 if quick else repeats, quick=quick)
        _note(f"{size}: from publishing to the first token, and memory")
        journeys, memory = measure_journeys(made)
        return {
            "model": size,
            "parameters": made.parameters,
            "bytes": made.bytes,
            "pauses": pauses,
            "journeys": journeys,
            "memory": memory,
            "load_average": [before, os.getloadavg()[0]],
        }


def _note(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
