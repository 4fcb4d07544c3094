"""A publisher, or a relay, that kills itself with SIGKILL before the k-th change of its disk.

`python -m tests.faults.killed_store` reads one JSON object a line and answers each with one: a
process is forked for it, so that hundreds of them cost little.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
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
from tests.faults.killed_worker import CALLS, Steps


def publish(order: dict[str, Any]) -> None:
    """Publish a directory into a local store."""
    run = RunStore(Path(order["store"]) / "policy", "policy")
    options = PublishOptions(
        source=Path(order["source"]), threads=1, link=order["link"], keep=order["keep"]
    )
    publish_directory(options, run, [signer()], lambda: time.time_ns() // 1_000_000)


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


def one(order: dict[str, Any]) -> dict[str, Any]:
    """Fork a process; return how it ended and which steps it took."""
    reading, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            steps = Steps(order["store"], order["kill_before"], told)
            for name in CALLS:
                steps.watch(name)
            {"publish": publish, "relay": relay}[order["what"]](order)
        except BaseException as error:
            os.write(told, f"failed: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(told)
    with open(reading, encoding="utf-8", errors="replace") as lines:
        steps_taken = lines.read().splitlines()
    _, status = os.waitpid(child, 0)
    return {"event": "ended", "status": os.waitstatus_to_exitcode(status), "steps": steps_taken}


def main() -> None:
    """Answer orders until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
