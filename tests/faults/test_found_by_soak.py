"""What `python -m loadtest.soak` found, each as a test of its whole kind."""

import os
from pathlib import Path

import pytest

from tests.contract.made import SHARD, noise, publish
from tests.contract.relays import config, running, wait_head
from tests.contract.wire_client import eventually

RUN = "policy"


def deleted_but_open(below: Path) -> list[str]:
    """Files and directories that this process has open although they have no name any more."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(str(below)) and target.endswith(" (deleted)"):
            found.append(target)
    return found


@pytest.mark.fault(22)
async def test_an_origin_lets_go_of_versions_that_its_publisher_removed(tmp_path: Path) -> None:
    """Every publication is another process's eviction; each cost the origin a descriptor."""
    store = tmp_path / "store"
    versions = store / RUN / "versions"
    publish(store, tmp_path / "1", {"model.safetensors": noise(2 * SHARD, 1)})
    async with running(config(store)) as url:
        await wait_head(url)
        for number in range(2, 9):
            source = tmp_path / str(number)
            publish(store, source, {"model.safetensors": noise(2 * SHARD, number)})
        assert not (versions / "000001").exists()
        await eventually(lambda: not deleted_but_open(tmp_path), what="removed versions let go")
