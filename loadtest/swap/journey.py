"""From `shardcast publish` to the first token of the new version, through relay, agent and engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from loadtest.measure import tree
from loadtest.scenario import MB
from loadtest.swap.bench import TIMEOUT_S, VERSIONS, Bench, wall_of
from loadtest.swap.engine import KEY
from loadtest.swap.peaks import peaks
from loadtest.topology import Worker

PHASES = ("publish", "announce", "transfer", "stage", "activate", "first_token")


def measure_journeys(bench: Bench) -> tuple[dict[str, Any], dict[str, Any]]:
    """Publish a step as a delta, and another version whole; then one more, with an eye on memory."""
    token = bench.checkpoints / "engine.token"
    token.write_text(KEY + "\n")
    # The engine is at version 2, the newest: the agent has nothing to do until more is published.
    bench.server.stage(bench.targets[1])
    bench.server.activate(bench.targets[1])
    agent = bench.follow(
        "--engine", "vllm", "--engine-url", bench.server.url, "--engine-token-file", str(token)
    )
    bench.server.wait_told(2)
    _delta, _full, _watched = VERSIONS[2:]
    found = {
        "delta": _journey(bench, agent, bench.checkpoints / _delta),
        "full": _journey(bench, agent, bench.checkpoints / _full, "--no-delta"),
    }
    assert bench.server.process is not None
    roots = {"agent": agent.process.pid, "engine": bench.server.process.pid}
    with peaks(roots) as seen:
        _journey(bench, agent, bench.checkpoints / _watched, "--no-delta")
    memory = {
        name: {
            "processes": len(tree(pid)),
            "before_mb": {key: value / MB for key, value in seen.before[name].items()},
            "most_mb": {key: value / MB for key, value in seen.most[name].items()},
            "resident_mb": seen.resident[name] / MB,
        }
        for name, pid in roots.items()
    }
    agent.process.stop()
    return found, memory


def _journey(bench: Bench, agent: Worker, checkpoint: Path, *options: str) -> dict[str, Any]:
    with bench.clients() as clients:
        clients.watch(0, tokens=20)
        published = bench.tree.publish(
            checkpoint, "--durability", "none", *options, timeout=TIMEOUT_S
        )
        version = published.version

        def event(kind: str) -> dict[str, Any]:
            return agent.process.wait_event(
                kind, timeout=TIMEOUT_S, where=lambda one: one.get("version") == version
            )

        event("activated")
        (swap,) = [one for one in bench.server.state()["swaps"] if f"/{version}/" in one["to"]]
        clients.watch(0.2, tokens=1)
        arrivals = [wall_of(token.t) for token in clients.tokens]
    moments = [
        published.process.started_unix_ms,
        published.event["t"],
        event("head")["t"],
        event("committed")["t"],
        event("staged")["t"],
        swap["resumed_at"],
        min(t for t in arrivals if t >= swap["resumed_at"]),
    ]
    took = {name: b - a for name, a, b in zip(PHASES, moments, moments[1:], strict=False)}
    return {
        "phases_ms": took,
        "all_ms": moments[-1] - moments[0],
        "from_announcement_ms": moments[-1] - moments[1],
        "pause_ms": swap["pause_ms"],
        "fetched_mb": (event("ready").get("bytes_fetched") or 0) / MB,
        "load_average": os.getloadavg()[0],
    }
