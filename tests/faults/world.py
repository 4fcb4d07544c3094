"""Who meets a fault: followers and pulls in this process, readers on the wire, relays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardcast.config import NetConfig
from shardcast.events import EventKind, WorkerEvent
from shardcast.store.stored import Durability
from shardcast.worker import Update, Worker
from tests import observer
from tests.contract.wire_client import Wire, eventually
from tests.fakes import KIB, FakeRun
from tests.faults.criteria import Verdict, reports
from tests.unit.worker.conftest import some_bytes

PATIENT = NetConfig(
    connect_timeout_s=5.0,
    read_timeout_s=10.0,
    header_timeout_s=15.0,
    rate_window_s=10.0,
    backoff_first_s=0.01,
    backoff_cap_s=0.1,
    retry_after_cap_s=0.5,
    give_up_after_s=20.0,
    head_wait_s=20,
    head_poll_s=0.05,
    head_grace_s=0.3,
    hedge_s=30.0,
    lag_s=30.0,
    silent_s=30.0,
)
"""Quick to try again, and slow to lose patience: a busy machine must not look like a fault."""

BRISK = replace(
    PATIENT,
    connect_timeout_s=0.5,
    read_timeout_s=0.5,
    header_timeout_s=1.0,
    minimum_rate_bytes_per_s=20_000,
    rate_window_s=0.4,
)
"""For faults that only a timeout can tell."""


def small_version(seed: int = 1) -> dict[str, bytes]:
    """Seven shards of 256 KiB and less, a subfolder and an empty file."""
    return {
        "model-00001-of-00002.safetensors": some_bytes(768 * KIB, seed),
        "model-00002-of-00002.safetensors": some_bytes(300 * KIB + 1, seed + 100),
        "config.json": b'{"model_type": "test"}',
        "tokenizer/vocab.txt": f"{seed}\n".encode(),
        "empty.txt": b"",
    }


def needed_bytes(run: FakeRun) -> int:
    """All blobs of a run, each once: what somebody without anything has to fetch."""
    return sum(map(len, run.blobs.values()))


class Log(observer.Log):
    """An observer that keeps what it is told, and can say it in lines."""

    @property
    def reports(self) -> list[str]:
        """What it was told about errors."""
        return reports(self.events)


@dataclass
class Follower:
    """A worker that follows a run in this process, from the start to the end of its block."""

    out: Path
    log: Log = field(default_factory=Log)
    updates: list[Update] = field(default_factory=list)

    async def reaches(self, version: int) -> Update:
        """Wait until it has committed a version."""
        await eventually(
            lambda: any(update.version == version for update in self.updates),
            what=f"version {version} at {self.out}: {self.log.reports[-5:]}",
        )
        return next(update for update in self.updates if update.version == version)

    async def says(self, kind: EventKind) -> WorkerEvent:
        """Wait for an event."""
        await eventually(lambda: self.log.of(kind), what=f"{kind} at {self.out}")
        return self.log.of(kind)[0]


def worker(out: Path, run: FakeRun, *urls: str, **options: Any) -> Worker:
    """A worker for tests."""
    defaults = {"keys": run.keys, "config": PATIENT, "durability": Durability.NONE}
    return Worker(out, run.name, urls, **{**defaults, **options})


@asynccontextmanager
async def following(out: Path, run: FakeRun, *urls: str, **options: Any) -> AsyncIterator[Follower]:
    """Follow a run while the block runs; an error that ends following fails the test."""
    follower = Follower(out)

    async def follow() -> None:
        async for update in worker(out, run, *urls, observer=follower.log, **options).follow():
            follower.updates.append(update)

    task = asyncio.ensure_future(follow())
    try:
        yield follower
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Reader:
    """Somebody who wants one blob of a relay, and asks until it is there."""

    url: str
    run: str
    digest: str
    verdict: Verdict
    outcomes: list[str] = field(default_factory=list)

    async def read(self) -> None:
        """Ask until a whole blob came; each whole one must be right."""

        async def once() -> bool:
            self.outcomes.append(await self._once())
            return self.outcomes[-1] == "whole"

        await eventually(once, what=f"{self.digest} from {self.url}: {self.outcomes[-5:]}")

    async def _once(self) -> str:
        async with Wire(self.url) as wire:
            await wire.ask(f"/v1/{self.run}/blobs/{self.digest}.bin")
            try:
                answer = await wire.answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                return "no answer"
        if answer.status != 200:
            assert answer.status in (404, 503), answer
            return str(answer.status)
        if not answer.whole:
            return f"cut after {len(answer.body)}"
        self.verdict.served(self.digest, answer.body)
        return "whole"
