"""A worker killed before each single change of its disk, and one whose state is damaged then."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import Process, Processes
from shardcast.store.run import RunStore
from tests.fakes import KIB, FakeRun
from tests.faults.criteria import assert_version, digest_of_file, published
from tests.faults.upstream import Upstream
from tests.unit.worker.conftest import some_bytes

WAIT_S = 60
SHARD = 256 * KIB


def version(number: int) -> dict[str, bytes]:
    """Two files that are recycled, one that stays the same, one too small for either."""
    return {
        "a.bin": some_bytes(2 * SHARD + 17, number),
        "deep/b.bin": some_bytes(SHARD, number + 50),
        "same.bin": some_bytes(SHARD, 99),
        "config.json": b"%d" % number,
    }


@dataclass
class Bench:
    """Where workers are killed.

    Attributes:
        run: Three versions, of which the head names as many as were announced.
        upstream: Serves it.
        killer: Forks workers (``tests.faults.killed_worker``).
        place: Directories go below it.
    """

    run: FakeRun
    upstream: Upstream
    killer: Process
    place: Path
    durability: str = "sync"
    orders: int = 0

    def work(
        self, out: Path, version: int, kill_before: int | str | None = None, *, pull: bool = False
    ) -> dict[str, Any]:
        """Let a worker follow up to a version; return its status and steps.

        Args:
            out: Its directory.
            version: It ends after this one.
            kill_before: It kills itself before the step with this number, or the first one that
                begins so.
            pull: Pull once instead.
        """
        self.killer.say(
            json.dumps(
                {
                    "out": str(out),
                    "run": self.run.name,
                    "url": self.upstream.url,
                    "key": self.run.keys[0].hex(),
                    "durability": self.durability,
                    "keep": 1,
                    "hook": f"echo $SHARDCAST_VERSION >> {out}.hooks",
                    "version": version,
                    "kill_before": kill_before,
                    "pull": pull,
                }
            )
        )
        self.orders += 1
        count = self.orders
        self.killer.wait_event(
            "ended", timeout=WAIT_S, where=lambda _: len(self.killer.events("ended")) >= count
        )
        return self.killer.events("ended")[count - 1]

    def sent(self, number: int) -> int:
        """Bytes of a version's own shards that were sent so far."""
        return sum(self.upstream.sent[digest] for digest in set(self.run.shard_digests(number)))

    def hooks(self, out: Path) -> list[str]:
        """The versions that the hook ran for."""
        path = Path(f"{out}.hooks")
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    run = FakeRun()
    run.publish(version(1))
    place = Path(tempfile.mkdtemp(prefix="killed-", dir="/dev/shm"))
    try:
        with Upstream(run) as upstream, Processes(tmp_path / "logs") as processes:
            argv = [sys.executable, "-m", "tests.faults.killed_worker"]
            killer = processes.start(argv, name="killer", stdin=True)
            yield Bench(run, upstream, killer, place)
    finally:
        shutil.rmtree(place)


def assert_nothing_wrong(out: Path, run: FakeRun, newest: int) -> None:
    """``current`` names the old version or the new one, and every name in ``versions`` is true."""
    truth = published(run)
    if newest > 1:
        assert_version(out, truth, int((out / "current").resolve().name))
    versions = out / "versions"
    for directory in versions.iterdir() if versions.exists() else ():
        if directory.name.startswith("."):
            continue
        expected = truth(int(directory.name))
        files = [path for path in directory.rglob("*") if path.is_file()]
        found = {str(p.relative_to(directory)): digest_of_file(p) for p in files}
        assert found == expected, directory


def recorded_bytes(out: Path, number: int) -> int:
    """Bytes of a version's shards that are on disk and recorded, apart from the unchanged file."""
    store = RunStore(out, "policy")
    try:
        stored = store.stored(number)
        if stored is None:
            return 0
        extents = map(stored.version.layout.extent, stored.present())
        return sum(extent.length for extent in extents if extent.path != "same.bin")
    finally:
        store.close()


def age_leftovers(out: Path) -> list[Path]:
    """Make what a killed process left in the middle of a write look old; return it."""
    found = [path for path in out.rglob(".*.tmp") if path.parent.name != "serve"]
    before = time.time() - 7200
    for path in found:
        os.utime(path, (before, before), follow_symlinks=False)
    return found


def a_worker_with_a_spare(bench: Bench) -> Path:
    """OUT on version 2, whose worker was killed with version 1's files kept as spares."""
    out = bench.place / "before"
    assert bench.work(out, 1)["status"] == 0
    bench.run.publish(version(2))
    # They are dropped when it ends in order, which is kept from happening.
    assert bench.work(out, 2, kill_before="unlink state/spare/")["status"] == -signal.SIGKILL
    assert len(list((out / "state" / "spare").iterdir())) >= 2
    return out


@pytest.mark.fault(20)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("durability", ["sync", "none"])
def test_a_worker_killed_before_any_change_of_its_disk(bench: Bench, durability: str) -> None:
    bench.durability = durability
    before = a_worker_with_a_spare(bench)
    bench.run.publish(version(3))
    needed = sum(len(data) for name, data in version(3).items() if name != "same.bin")
    seen: set[str] = set()
    kill_before, ended = 0, False
    while not ended:
        out = bench.place / f"out-{kill_before}"
        shutil.copytree(before, out, symlinks=True)
        done = bench.work(out, 3, kill_before)
        ended = done["status"] == 0
        if not ended:
            assert done["status"] == -signal.SIGKILL, done["steps"][-3:]
        seen |= {step.split(" ")[0] for step in done["steps"]}
        at = f"killed after {done['steps'][-1:]}"
        assert_nothing_wrong(out, bench.run, 3)
        there, sent = recorded_bytes(out, 3), bench.sent(3)
        left = age_leftovers(out)

        # A follower whose hook has run has no news to tell, and would wait for version 4.
        again = bench.work(out, 3, pull=bench.hooks(out)[-1:] == ["3"])
        assert again["status"] == 0, (at, again)
        assert_nothing_wrong(out, bench.run, 3)
        assert (out / "current").resolve().name == "000003", at
        assert bench.sent(3) - sent <= needed - there, at
        assert bench.hooks(out)[-1:] == ["3"], (at, bench.hooks(out))
        assert bench.hooks(out).count("3") == 1, at
        assert os.listdir(out / "versions") == ["000003"], at
        assert not [path for path in left if os.path.lexists(path)], at
        for name in ("trash", "spare", "staging"):
            assert not list((out / "state").glob(f"{name}/*")), (at, name)
        shutil.rmtree(out)
        kill_before += 1
    assert kill_before > 40
    assert {
        "fsync",
        "link",
        "rename",
        "replace",
        "symlink",
        "unlink",
        "rmdir",
        "mkdir",
        "pwrite",
    } <= seen


# --- killed with everything there, and then its state is damaged -------------------------------


def zeroed(path: Path, out: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut_short(path: Path, out: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def of_another_version(path: Path, out: Path) -> None:
    shutil.copyfile(path.with_name(path.name.replace("000003", "000002")), path)


def of_another_run(path: Path, out: Path) -> None:
    data = path.read_bytes().replace(b'"policy"', b'"poison"')
    path.write_bytes(data[:8] + os.urandom(32) + data[40:] if path.suffix == ".shards" else data)


def gone(path: Path, out: Path) -> None:
    path.unlink()


DAMAGE = [
    (name, damage)
    for name in ("000003.json", "000003.shards")
    for damage in (zeroed, cut_short, of_another_version, of_another_run, gone)
] + [
    (name, damage)
    for name in ("scanned.json", "hooked", "../head.json")
    for damage in (zeroed, cut_short, gone)
]


@pytest.mark.fault(20)
@pytest.mark.parametrize("until", ["fsync state/staging/", "symlink versions/000003"])
def test_state_that_is_damaged_costs_no_wrong_byte_and_no_shard(bench: Bench, until: str) -> None:
    before = a_worker_with_a_spare(bench)
    bench.run.publish(version(3))
    assert bench.work(before, 3, kill_before=until)["status"] == -signal.SIGKILL
    for name, damage in DAMAGE:
        out = bench.place / f"out-{name.replace('/', '-')}-{damage.__name__}"
        shutil.copytree(before, out, symlinks=True)
        shutil.copyfile(f"{before}.hooks", f"{out}.hooks")
        damage(out / "state" / name, out)
        sent = bench.sent(3)
        again = bench.work(out, 3, pull=True)
        assert again["status"] == 0, (name, damage, again["steps"][-3:])
        assert_nothing_wrong(out, bench.run, 3)
        assert (out / "current").resolve().name == "000003"
        assert bench.sent(3) == sent, (name, damage.__name__)


@pytest.mark.fault(20)
@pytest.mark.parametrize("damage", [zeroed, cut_short])
def test_damaged_trust_is_for_a_person_to_decide(bench: Bench, damage: Any) -> None:
    out = a_worker_with_a_spare(bench)
    damage(out / "state" / "trust.json", out)
    refused = bench.work(out, 2, pull=True)
    assert refused["status"] == 1
    assert "remembered trust is damaged" in refused["steps"][-1]
    assert_nothing_wrong(out, bench.run, 2)
    (out / "state" / "trust.json").unlink()
    assert bench.work(out, 2, pull=True)["status"] == 0
