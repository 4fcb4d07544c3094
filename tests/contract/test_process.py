"""A relay as a process: killed in the middle of a fill, and told to stop."""

import asyncio
import contextlib
import resource
import signal
import sys
from pathlib import Path

import pytest

from shardcast.protocol.digest import digest_of
from tests.contract.made import SHARD, make_head, make_version, noise
from tests.contract.relays import path_of, process, wait_ready
from tests.contract.scripted import Pause, ScriptedParent
from tests.contract.wire_client import PATIENCE_S, Wire, http

pytestmark = pytest.mark.e2e

VERSION = make_version(1, {"model": noise(6 * SHARD + 5)})
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
os.execv(sys.argv[1], sys.argv[1:])
"""


async def test_killed_in_the_middle_of_a_fill_it_serves_nothing_partial(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    victim = VERSION.shards[3]
    pause = Pause(after=SHARD - 100)
    parent.script(victim, pause)
    async with parent.running():
        async with process(tmp_path / "r", "--parent", parent.url) as (url, relay):
            await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
            async with Wire(url) as wire:  # a reader that follows the fill is cut off
                await wire.ask(path_of(victim))
                await wire.head()
                await wire.exactly(1000)
                relay.send_signal(signal.SIGKILL)
                assert len(await wire.rest()) < SHARD
        pause.go.set()
        before = parent.count(VERSION.shards)
        async with process(tmp_path / "r", "--parent", parent.url) as (url, _relay):
            for digest in VERSION.shards:
                answer = await http(url, path_of(digest))
                assert (answer.status, digest_of(answer.body)) == (200, digest)
            await wait_ready(url)
        again = parent.count(VERSION.shards) - before
        assert 1 <= again < len(VERSION.shards)  # what was verified was not fetched again


async def test_sigterm_drains_and_exits_with_0(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    victim = VERSION.shards[0]
    pause = Pause(after=100_000)
    parent.script(victim, pause)
    async with (
        parent.running(),
        process(tmp_path / "r", "--parent", parent.url) as (url, relay),
        Wire(url) as wire,
    ):
        await asyncio.wait_for(pause.reached.wait(), PATIENCE_S)
        await wire.ask(path_of(victim))
        await wire.head()
        got = await wire.exactly(50_000)
        relay.send_signal(signal.SIGTERM)
        pause.go.set()
        got += await wire.exactly(SHARD - 50_000)
        assert digest_of(got) == victim
        assert await asyncio.wait_for(relay.wait(), PATIENCE_S) == 0


async def test_more_connections_than_descriptors_are_refused_and_forgotten(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    async with (
        parent.running(),
        process(tmp_path / "r", "--parent", parent.url) as (url, relay),
    ):
        resource.prlimit(relay.pid, resource.RLIMIT_NOFILE, (256, 256))
        await wait_ready(url)
        # The limit was another one when it started, so it lets in more than it can afford.
        crowd = [Wire(url) for _ in range(400)]
        with contextlib.suppress(OSError, TimeoutError):
            for wire in crowd:
                await asyncio.wait_for(wire.__aenter__(), 0.5)
        for wire in crowd:
            if hasattr(wire, "writer"):
                wire.writer.transport.abort()
        answer = await http(url, path_of(VERSION.shards[0]))
        assert digest_of(answer.body) == VERSION.shards[0]
        relay.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(relay.wait(), PATIENCE_S) == 0


async def test_a_burst_of_connections_within_the_descriptors_that_it_started_with(
    tmp_path: Path,
) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(VERSION), VERSION)
    limited = (sys.executable, "-c", LIMITED)
    async with (
        parent.running(),
        process(tmp_path / "r", "--parent", parent.url, inside=limited) as (url, _relay),
    ):
        await wait_ready(url)
        crowd = [Wire(url) for _ in range(300)]
        await asyncio.gather(*(wire.__aenter__() for wire in crowd))
        # It never runs out of descriptors: who comes now is answered or refused, and waits in no queue.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await http(url, "/healthz")  # within PATIENCE_S
        for wire in crowd:
            wire.writer.transport.abort()
        answer = await http(url, path_of(VERSION.shards[0]))
        assert digest_of(answer.body) == VERSION.shards[0]
