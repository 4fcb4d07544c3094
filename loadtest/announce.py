"""How long news takes: from `published` to the first blob request at the third tier.

origin -> two sibling relays -> third-tier relay -> worker. A TCP-level recorder stands between
the third-tier relay and its worker, so the moment counts at which a blob request for the new
version reaches a third-tier server: the head has crossed three hops by then. The clock starts
at the `t` of publish's event; the origin has to notice the new head by itself.
"""

from __future__ import annotations

import statistics

from loadtest.checkpoints import write_checkpoint
from loadtest.recorder import Recorder
from loadtest.scenario import MB, Check, Report, Settings, Size, main
from loadtest.topology import Tree, Worker

LIMIT_MS = 200.0

_TIMEOUT_S = 60.0


def one_version(
    settings: Settings, tree: Tree, worker: Worker, recorder: Recorder, seed: int
) -> float:
    """Publish another version; return milliseconds to the first blob request for it."""
    checkpoint = settings.fresh("checkpoint")
    write_checkpoint(checkpoint, settings.bytes, weight_files=2, seed=seed)
    before = len(recorder.requests(lambda request: request.is_blob))
    published = tree.publish(checkpoint)
    first = recorder.wait_request(
        lambda request: request.is_blob, timeout=_TIMEOUT_S, count=before + 1
    )
    worker.wait_committed(published.version, timeout=_TIMEOUT_S)
    return first.unix_ms - float(published.event["t"])


def measure(settings: Settings) -> Report:
    """Time an announcement from publish to the third tier."""
    with Tree(settings.fresh("tree")) as tree:
        origin = tree.origin()
        second = tree.siblings(["relay0", "relay1"], parents=[origin.url])
        third = tree.relay("third", parents=[relay.url for relay in second])
        with Recorder(third.url) as recorder:
            worker = tree.follow("worker", sources=[recorder.url])
            # The first version only shows that everyone is connected and waiting.
            delays = [
                one_version(settings, tree, worker, recorder, seed)
                for seed in range(settings.repeats + 1)
            ][1:]
    return Report(
        checks=[Check("published_to_third_tier", statistics.median(delays), LIMIT_MS, "ms")],
        samples={"announce_ms": delays},
        conditions={
            "tiers": "origin, 2 sibling relays, 1 relay, 1 worker",
            "statistic": "median; negative: the request came before publish printed its event",
        },
    )


if __name__ == "__main__":
    main(measure, name="announce", full=Size(16 * MB, 15), quick=Size(8 * MB, 7))
