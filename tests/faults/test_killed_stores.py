"""A publisher and a relay killed before each single change of their disks (docs/PROTOCOL.md, 8)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Process, Processes
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import decode_head
from shardcast.store.run import RunStore
from shardcast.verify import verify_directory
from tests.contract.made import SHARD, noise
from tests.fakes import FakeRun, RunServer

WAIT_S = 60
FILES = {
    1: {"a/model": noise(2 * SHARD + 5, 1), "config.json": b"1", "empty": b""},
    2: {"a/model": noise(2 * SHARD + 5, 2), "config.json": b"2", "empty": b""},
}
BYTES = sum(map(len, FILES[2].values()))


@dataclass
class Bench:
    """Who forks, and where it works."""

    killer: Process
    place: Path
    orders: int = 0

    def order(self, what: str, store: Path, **options: Any) -> dict[str, Any]:
        """Let a process work; return its status and steps."""
        order = {"what": what, "store": str(store), "kill_before": None, **options}
        self.killer.say(json.dumps(order))
        self.orders += 1
        count = self.orders
        self.killer.wait_event(
            "ended", timeout=WAIT_S, where=lambda _: len(self.killer.events("ended")) >= count
        )
        return self.killer.events("ended")[count - 1]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    place = Path(tempfile.mkdtemp(prefix="killed-", dir="/dev/shm"))
    try:
        with Processes(tmp_path / "logs") as processes:
            argv = [sys.executable, "-m", "tests.faults.killed_store"]
            yield Bench(processes.start(argv, name="killer", stdin=True), place)
    finally:
        shutil.rmtree(place)


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        os.utime(directory / name, (1_700_000_000, 1_700_000_000))
    os.utime(directory, (1_700_000_000, 1_700_000_000))
    return directory


def versions_on_disk(run: Path) -> dict[int, dict[str, bytes]]:
    found = {}
    for directory in (run / "versions").iterdir() if (run / "versions").exists() else ():
        if not directory.name.startswith("."):
            files = [path for path in directory.rglob("*") if path.is_file()]
            found[int(directory.name)] = {
                str(path.relative_to(directory)): path.read_bytes() for path in files
            }
    return found


def assert_nothing_half(run: Path) -> None:
    """Every name in ``versions`` and ``blobs`` is true, and the head names what is whole."""
    on_disk = versions_on_disk(run)
    for number, files in on_disk.items():
        assert files == FILES[min(number, 2)], number
    for path in (run / "blobs").glob("*.bin"):
        if not path.name.startswith("."):
            assert digest_of(path.read_bytes()) == path.stem
    if (run / "head.json").exists():
        decode_head(open_unverified((run / "head.json").read_bytes())[1])


@pytest.mark.fault(22)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("link", "stream"),
    [(False, False), (True, False), (False, True)],
    ids=["copy", "link", "stream"],
)
def test_a_publisher_killed_before_any_change_leaves_the_old_head_or_the_new(
    bench: Bench, link: bool, stream: bool
) -> None:
    source = write(bench.place / "two", FILES[2])
    before = bench.place / "before"
    options: dict[str, Any] = {"link": link, "keep": 1, "stream": stream}
    one = write(bench.place / "one", FILES[1])
    assert bench.order("publish", before, source=str(one), **options)["status"] == 0
    options["source"] = str(source)
    outcomes: set[int | None] = set()
    kill_before = left_open = 0
    while True:
        store = bench.place / f"killed-{kill_before}"
        shutil.copytree(before, store)
        ended = bench.order("publish", store, kill_before=kill_before, **options)
        run = store / "policy"
        assert_nothing_half(run)
        head = decode_head(open_unverified((run / "head.json").read_bytes())[1])
        outcomes.add(head.version)
        left_open += head.open is not None
        for ref in head.versions:
            assert ref.version in versions_on_disk(run), f"the head names {ref.version}"
        if ended["status"] == 0:
            break
        assert ended["status"] == -signal.SIGKILL, ended["steps"]
        # The next publication needs nobody: it announces its version and tidies up.
        again = bench.order("publish", store, **{**options, "stream": False})
        assert again["status"] == 0, (kill_before, ended["steps"][-1:], again["steps"][-3:])
        assert_nothing_half(run)
        head = decode_head(open_unverified((run / "head.json").read_bytes())[1])
        assert head.open is None
        assert list(versions_on_disk(run)) == [head.version], (kill_before, ended["steps"][-1:])
        assert not RunStore(run, "policy").staged()
        assert not verify_directory(run, threads=1).damage
        shutil.rmtree(store)
        kill_before += 1
    assert kill_before > 25
    assert outcomes == {1, 2}
    assert (left_open > 10) is stream


@pytest.mark.fault(3)
@pytest.mark.timeout(300)
def test_a_relay_killed_before_any_change_serves_nothing_half_and_resumes(bench: Bench) -> None:
    run = FakeRun()
    run.publish(FILES[1])
    with RunServer(run) as server:
        before = bench.place / "before"
        options: dict[str, Any] = {"url": server.url, "key": run.keys[0].hex()}
        assert bench.order("relay", before, version=1, **options)["status"] == 0
        run.publish(FILES[2])
        options["version"] = 2
        kill_before = 0
        shards = set(run.shard_digests(2))
        while True:
            store = bench.place / f"killed-{kill_before}"
            shutil.copytree(before, store)
            server.sent.clear()
            ended = bench.order("relay", store, kill_before=kill_before, **options)
            assert_nothing_half(store / "policy")
            if ended["status"] == 0:
                break
            assert ended["status"] == -signal.SIGKILL, ended["steps"]
            again = bench.order("relay", store, **options)
            assert again["status"] == 0, (kill_before, ended["steps"][-1:], again["steps"][-3:])
            assert_nothing_half(store / "policy")
            assert versions_on_disk(store / "policy")[2] == FILES[2]
            assert not verify_directory(store / "policy", threads=1).damage
            # One transfer at a time: what was on its way may come twice, nothing else does.
            sent = sum(server.sent[digest] for digest in shards)
            assert sent <= BYTES + SHARD, (kill_before, ended["steps"][-1:])
            shutil.rmtree(store)
            kill_before += 1
        assert kill_before > 25
