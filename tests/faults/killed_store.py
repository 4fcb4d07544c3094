"""A publisher, or a relay, that kills itself with SIGKILL before the k-th change of its disk.

`python -m tests.faults.killed_store` reads one JSON object a line and answers each with one: a
process is forked for it (``tests.faults.killing``).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from relay.app import serve
from relay.config import RelayConfig
from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.made import signer
from tests.contract.relays import QUICK, limits
from tests.contract.wire_client import eventually
from tests.faults.killing import Steps, answer_orders
from tests.streams import AT_ONCE, StepByStep


def publish(order: dict[str, Any]) -> None:
    """Publish a directory into a local store."""
    run = RunStore(Path(order["store"]) / "policy", "policy")
    streams = bool(order.get("stream"))
    options = PublishOptions(
        source=Path(order["source"]),
        threads=1,
        link=order["link"],
        keep=order["keep"],
        stream=AT_ONCE if streams else None,
        delta=not streams,  # else shards are done a run at a time
    )
    # Each shard waits for the head that lists the one before: nothing happens in two orders.
    watch = StepByStep(run) if streams else None
    publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000, watch)


def relay(order: dict[str, Any]) -> None:
    """Relay a run until a version is whole here."""
    config = RelayConfig(
        store=Path(order["store"]),
        listen="127.0.0.1:0",
        parents=(order["url"],),
        runs=("policy",),
        pubkeys=(bytes.fromhex(order["key"]),),
        net=QUICK,
        limits=limits(prefetch_fills=1, fill_threads=1, drain_s=1.0),
    )
    wanted = Path(order["store"]) / "policy" / "versions" / f"{order['version']:06d}"

    async def until_whole() -> None:
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(config, ready=lambda url: None, stop=stop))
        await eventually(lambda: wanted.is_dir() or serving.done())
        stop.set()
        await serving

    asyncio.run(until_whole())


def work(order: dict[str, Any], told: int) -> None:
    """Do one of both."""
    Steps(order["store"], order["kill_before"], told).watch_all()
    {"publish": publish, "relay": relay}[order["what"]](order)


if __name__ == "__main__":
    answer_orders(work)
