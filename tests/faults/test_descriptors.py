"""256 file descriptors, and not one more: origin, relay and worker with many runs and clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardcast.keys import public_pem
from shardcast.protocol.digest import digest_of
from shardcast.store.store import Store
from tests.contract.made import publish, signer
from tests.contract.wire_client import PATIENCE_S, Wire, eventually, http
from tests.faults.machine import small_tmpfs

pytestmark = [pytest.mark.e2e, pytest.mark.fault(24)]

DESCRIPTORS = 256
RUNS = [f"run-{number:03d}" for number in range(200)]
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
LONG_S = 6 * PATIENCE_S


@dataclass
class Limited:
    """A process that may have only so many descriptors."""

    process: asyncio.subprocess.Process
    log: Path
    url: str = ""

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def sound(self) -> None:
        """It never ran out, and nothing broke."""
        said = self.said()
        for trouble in ("Too many open files", "Traceback", "ERROR", "out of system resource"):
            assert trouble not in said, said[-3000:]


@asynccontextmanager
async def limited(
    log: Path, *arguments: str | Path, descriptors: int = DESCRIPTORS
) -> AsyncIterator[Limited]:
    """Start a command that may have so many descriptors; kill it at the end if it still runs."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LIMITED, str(descriptors)),
            *("-m", "shardcast", *map(str, arguments)),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    try:
        yield Limited(process, log)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.communicate(), PATIENCE_S)


@asynccontextmanager
async def relay(
    root: Path, name: str, *options: str | Path, descriptors: int = DESCRIPTORS
) -> AsyncIterator[Limited]:
    command = ("relay", "--store", root / name, "--listen", "127.0.0.1:0", *options)
    log = root / f"{name}.log"
    async with limited(log, *command, descriptors=descriptors) as started:
        assert started.process.stdout is not None
        line = await asyncio.wait_for(started.process.stdout.readline(), LONG_S)
        assert line, started.said()
        started.url = json.loads(line)["url"]
        yield started


async def holds(started: Limited, version: int, runs: list[str]) -> None:
    """Wait until it holds a version of runs whole, and is ready."""

    async def check() -> bool:
        assert started.process.returncode is None, started.said()
        assert started.descriptors <= DESCRIPTORS
        known = json.loads((await http(started.url, "/v1/status")).body)["runs"]
        if any(known.get(run, {}).get("complete") != version for run in runs):
            return False
        return (await http(started.url, "/readyz")).status == 200

    async with asyncio.timeout(LONG_S):
        while not await check():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


def publish_all(root: Path, version: int) -> None:
    for number, run in enumerate(RUNS):
        files = {"model": b"%d of %d" % (version, number) * 1000}
        publish(root / "origin", root / "checkpoint", files, run=run)


def shards(root: Path) -> list[tuple[str, str]]:
    """Every shard of every version of every run at the origin."""
    store = Store(root / "origin")
    found = []
    for run in RUNS:
        for version in (1, 2):
            stored = store.run(run).stored(version)
            assert stored is not None
            found += [(run, digest) for digest in stored.version.digests if digest is not None]
        store.run(run).close()
    store.close()
    return found


async def serves_all(started: Limited, wanted: list[tuple[str, str]]) -> None:
    async with Wire(started.url) as wire:
        for run, digest in wanted:
            await wire.ask(f"/v1/{run}/blobs/{digest}.bin")
            answer = await wire.answer()
            assert (answer.status, digest_of(answer.body)) == (200, digest)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A file system on which 400 publications do not wait for a disk."""
    with small_tmpfs(tmp_path / "memory", 256 << 20) as mounted:
        yield mounted


async def test_two_hundred_runs_and_a_crowd(memory: Path) -> None:
    """Both relays hold 400 versions; a crowd waits and reads; new heads arrive."""
    key = memory / "key.pub"
    key.write_bytes(public_pem(signer(1).public_key))
    for version in (1, 2):
        await asyncio.to_thread(publish_all, memory, version)
    wanted = await asyncio.to_thread(shards, memory)
    assert len(wanted) == 400
    async with (
        relay(memory, "origin") as origin,
        relay(memory, "relay", "--parent", origin.url, "--pubkey", key) as second,
    ):
        assert f"only {DESCRIPTORS} file descriptors" in second.said()
        await holds(second, 2, RUNS)
        await serves_all(second, wanted)
        async with contextlib.AsyncExitStack() as stack:
            crowd = []
            for number in range(150):
                crowd.append(await stack.enter_async_context(
                    Wire(second.url, source=f"127.0.1.{1 + number}")
                ))  # fmt: skip
                run = RUNS[number]
                with contextlib.suppress(ConnectionError):  # refused, and not even politely
                    await crowd[-1].ask(f"/v1/{run}/head?after={10**15}&wait=25")
            assert second.descriptors <= DESCRIPTORS

            # Half of the connections may wait. The others are idle, and make room for a newcomer.
            async def newcomer() -> bool:
                with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                    answer = await http(second.url, f"/v1/{RUNS[0]}/head")
                    assert answer.status == 200 or "retry-after" in answer
                    return answer.status == 200
                return False

            await eventually(newcomer)
        await serves_all(second, wanted)
        third = {"model": b"the third" * 1000}
        for run in RUNS[::40]:
            await asyncio.to_thread(
                publish, memory / "origin", memory / "checkpoint", third, run=run
            )
        await holds(second, 3, RUNS[::40])
        await serves_all(second, wanted[1::2])
        for started in (origin, second):
            assert started.descriptors <= DESCRIPTORS
            started.sound()


async def test_a_worker_pulls_follows_and_serves(tmp_path: Path) -> None:
    key = tmp_path / "key.pub"
    key.write_bytes(public_pem(signer(1).public_key))
    files = {f"part-{number:03d}": os.urandom(3000) for number in range(400)}
    await asyncio.to_thread(publish, tmp_path / "origin", tmp_path / "c", files, run="policy")
    async with relay(tmp_path, "origin") as origin:
        trust = ("--from", origin.url, "--pubkey", key)
        pull = ("pull", "policy", *trust, "--out", tmp_path / "pulled")
        async with limited(tmp_path / "pull.log", *pull) as worker:
            async with asyncio.timeout(LONG_S):
                assert await worker.process.wait() == 0, worker.said()
            worker.sound()
        follow = ("follow", "policy", *trust, "--out", tmp_path / "followed", "--json")
        serve = ("--serve", "127.0.0.1:0")
        async with limited(tmp_path / "follow.log", *follow, *serve) as worker:
            assert worker.process.stdout is not None
            async with asyncio.timeout(LONG_S):
                async for line in worker.process.stdout:
                    if json.loads(line)["event"] == "committed":
                        break
            assert worker.descriptors <= DESCRIPTORS
            worker.sound()
        origin.sound()
    for out in ("pulled", "followed"):
        found = {path.name: path.read_bytes() for path in (tmp_path / out / "current").iterdir()}
        assert found == files


async def test_300_connections_at_64_descriptors_are_told_of_in_one_line(tmp_path: Path) -> None:
    publish(tmp_path / "store", tmp_path / "ckpt", {"model": bytes(1000)}, run=RUNS[0])
    async with relay(tmp_path, "store", descriptors=64) as origin:
        host, port = origin.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            os.kill(origin.process.pid, signal.SIGSTOP)
            try:  # when it looks, all of them are there
                for _ in range(300):
                    sock = stack.enter_context(socket.socket())
                    sock.setblocking(False)
                    sock.connect_ex((host, int(port)))
            finally:
                os.kill(origin.process.pid, signal.SIGCONT)
            await eventually(lambda: "out of file descriptors" in origin.said(), what="told")

        async def serves() -> bool:
            with contextlib.suppress(OSError):  # it has not noticed yet that the crowd has left
                return (await http(origin.url, f"/v1/{RUNS[0]}/head")).status == 200
            return False

        await eventually(serves, what="it serves")
        assert origin.said().count("out of file descriptors") == 1
        assert "Traceback" not in origin.said()
        assert "out of system resource" not in origin.said()
