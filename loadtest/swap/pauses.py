"""How long an engine does not answer: our plug-in, vLLM's `reload_weights`, a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from loadtest.swap.bench import Bench
from loadtest.swap.tokens import largest_gap, rate, recovery

STEADY_S: Final = {True: 1.5, False: 3.0}
AFTER_S: Final = {True: 1.0, False: 3.0}
RECOVERY_S: Final = 20.0
"""So long it is looked for."""

Sample = dict[str, Any]


def measure_pauses(bench: Bench, *, repeats: int, quick: bool) -> dict[str, list[Sample]]:
    """Swap forth and back by each method; the engine is at version 1 before and after."""
    first, second = bench.targets
    found: dict[str, list[Sample]] = {"shardcast": [], "reload_weights": [], "restart": []}
    bench.server.stage(first)
    bench.server.activate(first)  # it was started from elsewhere: now it is labelled
    for _ in range(repeats):
        for target in (second, first):
            bench.server.stage(target)
            found["shardcast"].append(_one(bench, partial(_ours, bench, target), quick))
        for target in (second, first):
            path = target["path"]
            found["reload_weights"].append(_one(bench, partial(_theirs, bench, path), quick))
    # Once, to the version that the last swap has left: it takes as long as ten swaps.
    found["restart"].append(_one(bench, partial(_restart, bench, first["path"]), quick))
    return found


def _ours(bench: Bench, target: dict[str, Any]) -> Sample:
    answer = bench.server.activate(target)
    return {"pause_ms": answer["pause_ms"], "phases_ms": answer["phases_ms"]}


def _theirs(bench: Bench, path: str) -> Sample:
    phases = bench.server.reload_weights(path)
    return {"pause_ms": sum(phases.values()), "phases_ms": phases}


def _restart(bench: Bench, path: str) -> Sample:
    began = time.monotonic()
    bench.server.kill()
    stopped = time.monotonic()
    bench.server.begin(path)
    bench.server.wait_started()
    ended = time.monotonic()
    phases = {"stop": (stopped - began) * 1000, "start": (ended - stopped) * 1000}
    return {"pause_ms": (ended - began) * 1000, "phases_ms": phases}


def _one(bench: Bench, swap: Callable[[], Sample], quick: bool) -> Sample:
    copy = bench.copy()
    with bench.clients() as clients:
        clients.watch(0, tokens=20)  # all are at it
        clients.watch(STEADY_S[quick], tokens=20)
        began = time.monotonic()
        steady = rate(clients.tokens, began - STEADY_S[quick], began)
        sample = swap()
        ended = time.monotonic()
        back, seen = None, list(clients.tokens)
        while back is None and time.monotonic() < ended + RECOVERY_S:
            clients.watch(AFTER_S[quick], tokens=20)
            seen = list(clients.tokens)
            back = recovery(seen, began, steady, ended)
        lost, broken = clients.lost, clients.broken
    return {
        **sample,
        "gap_ms": largest_gap(seen, began, seen[-1].t) * 1000,
        "gap_before_ms": largest_gap(seen, began - STEADY_S[quick], began) * 1000,
        "recovery_ms": None if back is None else back * 1000,
        "tokens_per_s": steady,
        "lost_tokens": lost,
        "broken_answers": broken,
        "copy_one_ms": copy["one_ms"],
        "copy_all_ms": copy["all_ms"],
        "load_average": os.getloadavg()[0],
    }
