"""A real network between worker and origin: slow, then silent, then back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest

from loadtest.topology import shardcast
from shardcast.events import EventKind
from shardcast.keys import load_public_key
from shardcast.store.stored import Durability
from shardcast.worker import Worker
from tests.contract.wire_client import eventually
from tests.faults.criteria import criteria, directories
from tests.faults.machine import Networks
from tests.faults.world import BRISK, Log
from tests.tree import MiB, shard_bytes_of, small_checkpoint, tree

SIZE: Final = 4 * MiB
RATE: Final = "16mbit"  # two seconds for all of it


@pytest.mark.fault(12)
@pytest.mark.e2e
@pytest.mark.parametrize("fault", ["dropped", "blackholed", "unplugged"])
async def test_a_link_that_loses_everything_for_a_while(tmp_path: Path, fault: str) -> None:
    """The worker says which source is silent, keeps what it has, and goes on when it can.

    Whoever is on the other side of the broken link gets everything meanwhile.
    """
    with Networks() as networks, tree(tmp_path / "tree") as made:
        source = small_checkpoint(tmp_path / "ckpt", size=SIZE)
        made.publish(source)
        space = networks.namespace()
        space.limit(RATE)
        argv = space.argv(*shardcast("relay", "--store", made.store, "--listen", "0.0.0.0:8470"))
        origin = made.processes.start(argv, name="origin")
        origin.wait_event("listening", timeout=30)
        url = f"http://{space.there}:8470"
        out, log = tmp_path / "out", Log()
        key = load_public_key(made.keys / "shardcast.pub")
        worker = Worker(
            out, made.run, [url], keys=[key], config=BRISK, observer=log,
            durability=Durability.NONE,
        )  # fmt: skip
        with criteria(directories({1: source})) as verdict:
            verdict.watch(out)
            pulling = asyncio.ensure_future(worker.apull())
            try:
                await eventually(lambda: coming(log) > SIZE // 8, what="an eighth of it")
                with getattr(space, fault)():
                    await eventually(lambda: bool(log.of(EventKind.SOURCE)), what="a report")
                    there = tmp_path / "there"
                    beside = shardcast(
                        "pull", made.run, "--from", "http://127.0.0.1:8470", "--out", there,
                        *made.trust, "--json",
                    )  # fmt: skip
                    process = made.processes.start(space.argv(*beside), name="beside")
                    await asyncio.to_thread(process.check, timeout=60)
                update = await asyncio.wait_for(pulling, 60)
            finally:
                pulling.cancel()
                await asyncio.gather(pulling, return_exceptions=True)
            verdict.named(log.reports, url, "nothing came|connect|bytes/s|no answer")
            verdict.unaffected(there, directories({1: source}), 1, errors_of(process.events()))
            blobs = sum(path.stat().st_size for path in made.store.glob(f"{made.run}/blobs/*"))
            size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
            failures = len(log.of(EventKind.SOURCE)) + BRISK.connections_per_source
            verdict.fetched(
                update.bytes_fetched, size + blobs, failures=failures, unit=shard_bytes_of(SIZE)
            )
            assert update.bytes_fetched < 1.5 * SIZE, "what was verified is not fetched again"
            verdict.recovered(out, 1)


def coming(log: Log) -> int:
    return max((event.bytes_done or 0 for event in log.of(EventKind.PROGRESS)), default=0)


def errors_of(events: list[dict[str, object]]) -> list[str]:
    return [str(event) for event in events if event.get("event") in ("error", "source", "banned")]
