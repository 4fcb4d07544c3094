"""A worker that kills itself with SIGKILL before the k-th change of its disk, or a named one.

`python -m tests.faults.killed_worker` reads one JSON object a line, and answers each with one: a
worker is forked for it (``tests.faults.killing``).
"""

from __future__ import annotations

from typing import Any

from shardcast.hooks import UpdateHook
from shardcast.store import recycling
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.fakes import KIB
from tests.faults.killing import Steps, answer_orders
from tests.unit.worker.conftest import QUICK


def work(order: dict[str, Any], told: int) -> None:
    """Follow up to a version, recycling and with a hook, or pull once."""
    steps = Steps(order["out"], order["kill_before"], told)
    recycling.MIN_BYTES = KIB  # type: ignore[misc]
    recycling.REST_S = 0.0  # type: ignore[misc]
    steps.watch_all()
    worker = Worker(
        order["out"],
        order["run"],
        [order["url"]],
        keys=[bytes.fromhex(order["key"])],
        durability=Durability(order["durability"]),
        keep=order["keep"],
        on_update=UpdateHook(order["hook"]),
        config=QUICK,
    )
    if order["pull"]:
        worker.pull()
        return
    for update in worker.iterate():
        if update.version >= order["version"]:
            break


if __name__ == "__main__":
    answer_orders(work)
