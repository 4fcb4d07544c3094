"""What a follower does to the files of its versions is no change to who holds one of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcast.engine.forms import ACTIVATE_PATH, Identity, LoraRequest
from shardcast.worker import Update
from tests.fakes import FakeRun, RunServer
from tests.unit.safetensors import safetensors
from tests.unit.swapping.engine import NEW
from tests.unit.swapping.test_api import Server, members
from tests.unit.worker.test_pull import worker
from trainer_adapter.vllm.adapters import Adapters
from trainer_adapter.vllm.client import hold_adapter

CONFIG = "adapter_config.json"


class Follower:
    """Pulls one version after the other into an OUT, and keeps two."""

    def __init__(self, out: Path, run: FakeRun, server: RunServer) -> None:
        self._out, self._run, self._server = out, run, server
        self._made = 0

    def next(self) -> Update:
        """Have the next adapter published, and pull it: its configuration stays the same."""
        self._made += 1
        weights = safetensors({"w": ("F32", [256], bytes([self._made]) * 1024)})
        self._run.publish({CONFIG: b'{"r": 8}', "adapter_model.safetensors": weights})
        return worker(self._out, self._run, self._server, keep=2).pull()

    def identity(self, update: Update) -> Identity:
        return Identity(self._run.name, update.version, update.manifest)


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    run = FakeRun()
    with RunServer(run) as server:
        yield Follower(tmp_path / "out", run, server)


def test_links_to_its_files_and_evictions_are_no_change(follower: Follower) -> None:
    first, second = follower.next(), follower.next()
    with hold_adapter(follower.identity(second), str(second.path)) as held:
        links = os.stat(second.path / CONFIG).st_nlink

        third = follower.next()

        assert not first.path.exists()
        assert os.path.samefile(second.path / CONFIG, third.path / CONFIG)
        assert links == os.stat(second.path / CONFIG).st_nlink == 2  # one came, one went
        assert held.changed() is None
        held.verify()
        assert held.changed() is None

        (second.path / CONFIG).chmod(0o644)
        (second.path / CONFIG).write_bytes(b'{"r": 9}')
        assert held.changed() == f"{CONFIG} was changed or replaced"


async def test_adapters_come_back_after_a_swap_though_a_newer_version_came(
    follower: Follower,
) -> None:
    server = Server()
    await server.swapper.boot()
    adapters = server.swapper.after_load = Adapters(server.host, hold_adapter, server.swapper)
    loaded = await asyncio.to_thread(follower.next)
    named = follower.identity(loaded)
    request = LoraRequest(action="load", name="style", path=str(loaded.path), **named._asdict())
    await adapters.load(request)
    await asyncio.to_thread(follower.next)

    assert (await server.post(ACTIVATE_PATH, members(NEW))).status == 200

    assert server.swapper.state.last_failure is None
    assert [one.loaded for one in server.swapper.state.lora] == [True]
    await adapters.unload(request)
