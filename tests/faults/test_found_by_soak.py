"""What `python -m loadtest.soak` found, each as a test of its whole kind."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from shardcast.errors import BusyError
from shardcast.store.abandoned import create_temporary
from shardcast.store.run import RunStore
from shardcast.worker import Worker
from tests.contract.made import SHARD, MadeVersion, make_head, make_version, noise, publish, signer
from tests.contract.relays import config, limits, running, wait_head
from tests.contract.scripted import ScriptedParent
from tests.contract.wire_client import eventually, http
from tests.faults.machine import small_tmpfs

RUN = "policy"
MIB = 1 << 20


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


def old(path: Path) -> Path:
    """Makes a file look as if nobody had touched it for a while."""
    past = time.time() - 100
    os.utime(path, (past, past), follow_symlinks=False)
    return path


@pytest.mark.fault(3)
def test_what_a_killed_process_left_half_is_removed_and_what_is_being_written_stays(
    tmp_path: Path,
) -> None:
    """It used to lie there for an hour, and in the root and ``blobs/`` for ever."""
    store = RunStore(tmp_path, RUN)
    for name in ("blobs", "state/tmp"):
        (tmp_path / name).mkdir(parents=True)
    alive = store.temporary("ab")
    fd = create_temporary(alive)
    (tmp_path / ".current.1.0.tmp").symlink_to("versions/000001")
    dead = [
        tmp_path / ".current.1.0.tmp",
        tmp_path / ".head.json.1.0.tmp",
        tmp_path / "blobs" / ".ab.bin.1.0.tmp",
        tmp_path / "state" / ".trust.json.1.0.tmp",
        tmp_path / "state" / "tmp" / "ab.1.0",
    ]
    kept = [alive, tmp_path / "blobs" / "ab.bin", tmp_path / "state" / "run.lock"]
    for path in (*dead[1:], *kept[1:]):
        path.touch()
    for path in (*dead, *kept):
        old(path)
    (tmp_path / "state" / "tmp" / "fresh.1.1").touch()  # made, and not locked yet
    store.clean_leftovers()
    assert [path for path in dead if os.path.lexists(path)] == []
    assert all(path.exists() for path in (*kept, tmp_path / "state" / "tmp" / "fresh.1.1"))
    os.close(fd)
    store.clean_leftovers()
    assert not alive.exists()


@pytest.mark.fault(19)
def test_a_clock_that_is_wrong_by_a_day_makes_no_file_in_use_a_leftover(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    path = store.temporary("ab")
    fd = create_temporary(path)
    try:
        past = time.time() - 86400
        os.utime(path, (past, past))
        store.clean_leftovers()
        assert path.exists()
    finally:
        os.close(fd)


@pytest.mark.fault(16)
def test_a_version_that_was_evicted_meanwhile_is_busy_and_never_a_raw_error(
    tmp_path: Path,
) -> None:
    """Prefetching copies from older versions, and one of them may just have made room."""
    publish(tmp_path / "store", tmp_path / "1", {"model.safetensors": noise(SHARD, 1)})
    here, elsewhere = (RunStore(tmp_path / "store" / RUN, RUN) for _ in range(2))
    for evictor in (here, elsewhere):
        publish(tmp_path / "store", tmp_path / "2", {"model.safetensors": noise(SHARD, 2)})
        number = min(here.committed())
        stored = here.stored(number)
        assert stored is not None
        assert evictor.evict(number)
        here.forget_gone()
        with pytest.raises(BusyError, match="evicted"):
            stored.acquire_lease()
    here.close()
    elsewhere.close()


@pytest.mark.fault(15)
def test_staging_that_was_never_described_goes_once_its_number_is_history(tmp_path: Path) -> None:
    """A full disk leaves the directory and no description, and it used to lie there for an hour."""
    publish(tmp_path / "store", tmp_path / "1", {"model.safetensors": noise(SHARD, 1)})
    publish(tmp_path / "store", tmp_path / "2", {"model.safetensors": noise(SHARD, 2)})
    store = RunStore(tmp_path / "store" / RUN, RUN)
    store.evict(1)
    for number in (1, 3):
        store.staging_directory(number).mkdir(parents=True)
        old(store.staging_directory(number))
    store.clean_leftovers()
    assert store.staged() == [3]
    store.close()


@pytest.mark.fault(21)
def test_who_takes_over_a_store_lets_go_of_what_it_only_read_until_then(tmp_path: Path) -> None:
    """A successor looks at the disk again; the versions it knew before kept their directories."""
    store = tmp_path / "store"
    publish(store, tmp_path / "1", {"model.safetensors": noise(SHARD, 1)})
    successor = RunStore(store / RUN, RUN)
    successor.set_writer(False)
    known = successor.stored(1)
    assert known is not None
    with known.lease():  # somebody reads it at this moment
        successor.set_writer(True)
        os.close(known.open_file(0))
    again = successor.stored(1)
    assert again is not None
    assert again is not known
    os.close(known.open_file(0))  # it stays usable until the relay has looked again
    known.let_go()
    publish(store, tmp_path / "2", {"model.safetensors": noise(SHARD, 2)})
    assert successor.evict(1)
    assert deleted_but_open(tmp_path) == []
    successor.close()


@pytest.mark.fault(20)
async def test_a_guest_lets_go_of_versions_that_its_leader_removed(tmp_path: Path) -> None:
    """A second worker in a directory shares what the first commits, and never evicts by itself."""
    store = tmp_path / "store"
    publish(store, tmp_path / "1", {"model.safetensors": noise(SHARD, 1)})
    seen: dict[str, int] = {}

    async def follow(name: str, url: str) -> None:
        keys = [signer().public_key]
        async for update in Worker(tmp_path / "out", RUN, [url], keys=keys, keep=1).follow():
            seen[name] = update.version

    async with running(config(store)) as url:
        tasks = [asyncio.create_task(follow(name, url)) for name in ("leader", "guest")]
        try:
            for number in range(2, 7):
                await eventually(
                    lambda number=number: seen == {"leader": number - 1, "guest": number - 1},
                    what=f"version {number - 1} at both",
                )
                source = tmp_path / str(number)
                publish(store, source, {"model.safetensors": noise(SHARD, number)})
            await eventually(lambda: not deleted_but_open(tmp_path / "out"), what="let go")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def made(number: int) -> MadeVersion:
    return make_version(number, {"a": noise(4 * SHARD, number)})


async def ask(url: str, store: Path, version: MadeVersion) -> None:
    """Waits until a version is on disk, and asks for it."""
    directory = store / RUN / "versions" / f"{version.ref.version:06d}"
    await eventually(directory.exists, what=f"version {version.ref.version} on disk")
    answer = await http(url, f"/v1/{RUN}/blobs/{version.shards[0]}.bin")
    assert answer.body == version.blobs[version.shards[0]]


@pytest.mark.fault(15)
async def test_a_small_disk_gets_the_newest_version_though_all_older_ones_were_just_asked_for(
    tmp_path: Path,
) -> None:
    """It waited a minute for its workers to lose interest, and they for the newest version."""
    parent = ScriptedParent()
    with small_tmpfs(tmp_path / "disk", 7 * MIB // 2) as disk:
        parent.serve(make_head(made(1)), made(1))
        async with parent.running():
            settings = config(disk / "s", parent.url, limits=limits(recent_s=3600))
            async with running(settings) as url:
                for count in range(1, 6):
                    versions = [made(number) for number in range(1, count + 1)]
                    parent.serve(make_head(*versions), *versions)
                    await ask(url, disk / "s", versions[-1])
                kept = sorted(path.name for path in (disk / "s" / RUN / "versions").iterdir())
                assert kept[-1] == "000005"
                assert len(kept) >= 2


@pytest.mark.fault(16)
async def test_a_quota_alone_takes_nothing_from_those_who_just_asked(tmp_path: Path) -> None:
    parent = ScriptedParent()
    parent.serve(make_head(made(1)), made(1))
    async with parent.running():
        quota = 2 * 4 * SHARD + 1000
        settings = config(
            tmp_path / "s", parent.url, quota_bytes=quota, limits=limits(recent_s=3600)
        )
        async with running(settings) as url:
            for count in range(1, 5):
                versions = [made(number) for number in range(1, count + 1)]
                parent.serve(make_head(*versions), *versions)
                await ask(url, tmp_path / "s", versions[-1])
            assert len(list((tmp_path / "s" / RUN / "versions").iterdir())) == 4
