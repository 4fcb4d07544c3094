"""Relays for tests: inside the test's own event loop, and as processes."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from relay.app import serve
from relay.config import Limits, RelayConfig
from shardcast.config import NetConfig
from shardcast.keys import public_pem
from tests.contract.made import RUN, signer
from tests.contract.wire_client import PATIENCE_S, eventually, http

QUICK = NetConfig(
    connect_timeout_s=2.0,
    read_timeout_s=3.0,
    header_timeout_s=8.0,
    backoff_first_s=0.05,
    backoff_cap_s=0.3,
    head_poll_s=0.2,
)
LIMITS = Limits(drain_s=5.0, refresh_pause_s=0.1)


def config(store: Path, *parents: str, key: int | None = 1, **options: Any) -> RelayConfig:
    """The configuration of a relay for tests: free port, short timeouts."""
    if parents and key is not None and not options.get("first_use"):
        options.setdefault("pubkeys", (signer(key).public_key,))
    return RelayConfig(
        **{
            "store": store,
            "listen": "127.0.0.1:0",
            "parents": parents,
            "net": QUICK,
            "limits": LIMITS,
            **options,
        }
    )


def limits(**options: Any) -> Limits:
    return replace(LIMITS, **options)


@asynccontextmanager
async def running(settings: RelayConfig) -> AsyncIterator[str]:
    """Runs a relay; yields its URL; it must end by itself when told to."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(settings, ready=url.set_result, stop=stop))
    both: list[asyncio.Future[Any]] = [task, url]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    if not url.done():
        await task
    try:
        yield url.result()
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE_S)


@asynccontextmanager
async def process(
    store: Path, *options: str, listen: str = "127.0.0.1:0", inside: Sequence[str] = ()
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Runs `shardcast relay`; yields its URL; kills it at the end if it still runs.

    Args:
        store: Where it keeps what it has.
        options: Of the command.
        listen: Where it listens.
        inside: A command that runs it, for another network or other limits.
    """
    key = store.with_suffix(".pub")
    key.write_bytes(public_pem(signer(1).public_key))
    relay = await asyncio.create_subprocess_exec(
        *inside,
        *(sys.executable, "-m", "shardcast", "relay", "--store", str(store), "--listen", listen),
        *("--pubkey", str(key), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert relay.stdout is not None
    try:
        line = await asyncio.wait_for(relay.stdout.readline(), PATIENCE_S)
        yield json.loads(line)["url"], relay
    finally:
        if relay.returncode is None:
            relay.kill()
        await asyncio.wait_for(relay.communicate(), PATIENCE_S)


async def wait_ready(url: str) -> None:
    """Waits until the relay holds the newest version whole."""

    async def check() -> bool:
        return (await http(url, "/readyz")).status == 200

    await eventually(check, what=f"{url} ready")


async def wait_head(url: str, run: str = RUN) -> None:
    """Waits until the relay serves a head."""

    async def check() -> bool:
        return (await http(url, f"/v1/{run}/head")).status == 200

    await eventually(check, what=f"{url} has a head")


def path_of(digest: str, run: str = RUN) -> str:
    """The path of a blob."""
    return f"/v1/{run}/blobs/{digest}.bin"


async def status_of(url: str) -> Any:
    """What a relay says of itself."""
    return json.loads((await http(url, "/v1/status")).body)


async def metric(url: str, name: str) -> float:
    """The value of a relay's counter or gauge, of its only series."""
    text = (await http(url, "/metrics")).body.decode()
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])
