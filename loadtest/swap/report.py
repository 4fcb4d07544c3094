"""The figures as tables, and what they are judged by. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

COPIES: Final = 1.2
SLACK_MS: Final = 100.0
"""The goal: a pause is at most 1.2 copies of the weights, with one thread, and this."""

_METHODS: Final = {
    "shardcast": "our plug-in",
    "reload_weights": "vLLM's `reload_weights`",
    "restart": "restart",
}

Result = Mapping[str, Any]


def allowed_ms(result: Result) -> float:
    """Return the goal for a model's pause, from the copies that were made beside its swaps."""
    return COPIES * _middle(result["pauses"]["shardcast"], "copy_one_ms") + SLACK_MS


def checks(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return what is judged: the pause against the goal, and that clients lose nothing."""
    found = []
    for result in results:
        ours = result["pauses"]["shardcast"]
        values = {
            "pause_vs_goal": (_middle(ours, "pause_ms") / allowed_ms(result), 1.0, "ratio"),
            "lost_tokens": (sum(one["lost_tokens"] for one in ours), 0.0, "tokens"),
        }
        for name, (value, limit, unit) in values.items():
            found.append(
                {
                    "name": f"{name}_{result['model']}", "value": value, "limit": limit,
                    "unit": unit, "at_least": False, "passed": value <= limit,
                }
            )  # fmt: skip
    return found


def tables(report: Mapping[str, Any]) -> str:
    """Return everything as Markdown."""
    results: Sequence[Result] = report["models"]
    parts = [
        _pauses(results), _phases(results), _journeys(results), _memory(results),
        _conditions(report),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _pauses(results: Sequence[Result]) -> str:
    head = (
        "model", "method", "pause (ms)", "goal (ms)", "largest gap (ms)", "gap before (ms)",
        "recovery (ms)", "tokens lost", "one copy, 1 thread / all (ms)", "tokens/s before",
    )  # fmt: skip
    rows = []
    for result in results:
        for method, title in _METHODS.items():
            samples = result["pauses"][method]
            copies = f"{_span(samples, 'copy_one_ms')} / {_span(samples, 'copy_all_ms')}"
            goal = f"{allowed_ms(result):.0f}" if method == "shardcast" else ""
            lost = str(sum(one["lost_tokens"] for one in samples))
            rows.append(
                (
                    _name(result), title, _span(samples, "pause_ms"), goal,
                    _span(samples, "gap_ms"), _span(samples, "gap_before_ms"),
                    _span(samples, "recovery_ms"), lost, copies, _span(samples, "tokens_per_s"),
                )
            )  # fmt: skip
    return "## Pauses\n\n" + _table(head, rows)


def _phases(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for method, title in _METHODS.items():
            samples = [one["phases_ms"] for one in result["pauses"][method]]
            said = ", ".join(f"{name} {_span(samples, name)}" for name in samples[0])
            rows.append((_name(result), title, said))
    return "## Phases of the pauses (ms)\n\n" + _table(("model", "method", "phases"), rows)


def _journeys(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for kind, one in result["journeys"].items():
            phases = [f"{value:.0f}" for value in one["phases_ms"].values()]
            fetched = f"{one['fetched_mb']:.2f}"
            rows.append(
                (_name(result), kind, fetched, *phases, f"{one['all_ms']:.0f}", f"{one['pause_ms']:.0f}")
            )  # fmt: skip
    names = list(results[0]["journeys"]["delta"]["phases_ms"])
    head = ("model", "kind", "fetched (MB)", *names, "all", "of it pause")
    return "## `publish` started to the first token of the new version (ms)\n\n" + _table(
        head, rows
    )


def _memory(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        for name, one in result["memory"].items():
            figures = [
                f"{one[when][key]:.0f}"
                for key in ("pss", "pss_anonymous")
                for when in ("before_mb", "most_mb")
            ]
            rows.append(
                (_name(result), f"{name} ({one['processes']})", *figures, f"{one['resident_mb']:.0f}")
            )  # fmt: skip
    head = (
        "model", "who (processes)", "PSS before (MB)", "PSS, most", "anonymous PSS before",
        "anonymous PSS, most", "RSS high-water mark",
    )  # fmt: skip
    return "## Memory during a swap\n\n" + _table(head, rows)


def _conditions(report: Mapping[str, Any]) -> str:
    machine = report["environment"]
    loads = "; ".join(
        f"{result['model']} {result['load_average'][0]:.1f} to {result['load_average'][1]:.1f}"
        for result in report["models"]
    )
    return "\n".join(
        [
            "## Conditions",
            "",
            f"- {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}",
            f"- Python {machine['python']}, files on {machine['file_system']}",
            f"- load average (1 min) from begin to end: {loads}",
            f"- {report['seconds']:.0f} s in all, {report['conditions']['repeats']} rounds",
            f"- variables of vLLM's environment: {report['conditions']['variables'] or 'none'}",
        ]
    )


def _name(result: Result) -> str:
    return f"{result['parameters'] / 1e6:.1f} M, {result['bytes'] / 1e6:.0f} MB"


def _middle(samples: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(one[key] for one in samples))


def _span(samples: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the median, and from where to where the samples reach."""
    values = [one[key] for one in samples if one.get(key) is not None]
    if not values:
        return "none"
    missing = "" if len(values) == len(samples) else f" ({len(samples) - len(values)} never)"
    low, middle, high = min(values), statistics.median(values), max(values)
    digits = 1 if middle < 10 else 0
    if len(values) == 1:
        return f"{middle:.{digits}f}{missing}"
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f}){missing}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
