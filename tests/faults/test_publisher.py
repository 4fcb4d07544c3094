"""Publishers that are quicker than their readers, and publishers that die."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from loadtest.topology import shardcast
from shardcast.protocol.digest import digest_of
from shardcast.protocol.envelope import open_unverified
from shardcast.protocol.head import OpenRef, decode_head
from shardcast.protocol.layout import FileEntry, Layout, encode_layout, encode_part
from tests.contract.relays import config, running
from tests.fakes import KIB, FakeRun, RunServer
from tests.faults.criteria import SHARD, criteria, directories, published
from tests.faults.world import following, small_version
from tests.tree import MiB, Process, Tree, small_checkpoint, tree
from tests.unit.worker.conftest import some_bytes


@pytest.mark.fault(22)
async def test_two_more_versions_while_one_is_on_its_way(tmp_path: Path) -> None:
    """Whoever is slow goes on to the newest; whoever is quick gets all; nothing comes twice."""
    run = FakeRun()
    run.publish(small_version(1))
    out, quick = tmp_path / "out", tmp_path / "quick"
    with RunServer(run) as origin, criteria(published(run)) as verdict:
        verdict.watch(out, quick, tmp_path / "relay" / run.name)
        below = config(tmp_path / "relay", origin.url, key=None, pubkeys=run.keys, runs=(run.name,))
        async with (
            running(below) as relay,
            following(out, run, relay) as follower,
            following(quick, run, origin.url) as other,
        ):
            await asyncio.gather(follower.reaches(1), other.reaches(1))
            before = sum(origin.sent.values())
            run.publish(small_version(2))
            run.publish(small_version(3))
            run.publish(small_version(4))
            await asyncio.gather(follower.reaches(4), other.reaches(4))
            verdict.unaffected(quick, published(run), 4, other.log.reports)
        numbers = [update.version for update in follower.updates]
        assert numbers == sorted(set(numbers))
        assert not follower.log.reports
        verdict.waive("b", "no source is at fault")
        # The relay and the follower of the origin each fetched every shard at most once.
        new = sum(len(data) for n in (2, 3, 4) for data in run.files[n].values())
        documents = 64 * KIB
        assert sum(origin.sent.values()) - before <= 2 * (new + documents)
        verdict.waive("d", "counted above: two readers, each byte at most once")
        verdict.recovered(out, 4)


def opened(run: FakeRun, number: int, size: int) -> tuple[OpenRef, list[bytes]]:
    """An open version of which the first two shards are announced, and then no more."""
    layout = Layout(
        run=run.name,
        version=number,
        step=None,
        lineage="lineage",
        created_at=run.now_ms(),
        shard_bytes=256 * KIB,
        metadata={},
        files=[FileEntry(path="model", bytes=size)],
    )
    data = some_bytes(2 * SHARD, number)
    shards = [data[:SHARD], data[SHARD:]]
    layout_bytes = encode_layout(layout)
    part = encode_part(digest_of(layout_bytes), 0, [digest_of(shard) for shard in shards])
    for blob in (layout_bytes, part, *shards):
        run.blobs[digest_of(blob)] = blob
    ref = OpenRef(
        version=number,
        step=None,
        layout=digest_of(layout_bytes),
        parts=[digest_of(part)],
        deltas=[],
    )
    return ref, shards


@pytest.mark.fault(22)
async def test_a_publisher_dies_within_an_open_version(tmp_path: Path) -> None:
    """Half a version stays half: nobody waits for it, and the next one comes as ever."""
    run = FakeRun()
    run.publish(small_version(1))
    out, cold = tmp_path / "out", tmp_path / "cold"
    with RunServer(run) as origin, criteria(published(run)) as verdict:
        verdict.watch(out, cold, tmp_path / "relay" / run.name)
        below = config(tmp_path / "relay", origin.url, key=None, pubkeys=run.keys, runs=(run.name,))
        async with running(below) as relay, following(out, run, relay) as follower:
            await follower.reaches(1)
            ref, _ = opened(run, 2, 40 * SHARD)
            run.amend(open=ref)  # and that was its last word
            async with following(cold, run, relay) as late:
                await late.reaches(1)
                verdict.unaffected(cold, published(run), 1, late.log.reports)
            assert not (tmp_path / "relay" / run.name / "versions" / "000002").exists()
            # The next publisher never uses the number again.
            run.files[2] = {}
            third = run.add_version(3, small_version(3))
            assert run.head is not None
            run.amend(open=None, version=3, versions=[third, *run.head.versions])
            await follower.reaches(3)
        verdict.waive("b", "no source is at fault")
        verdict.waive("d", "nothing failed")
        verdict.recovered(out, 3)


def steps_of(made: Tree, known: dict[int, int]) -> dict[int, int]:
    """Add to what is known: the versions that the origin's head names, and the step of each."""
    envelope = (made.store / made.run / "head.json").read_bytes()
    for ref in decode_head(open_unverified(envelope)[1]).versions:
        assert ref.step is not None
        assert known.setdefault(ref.version, ref.step) == ref.step, "a number was used twice"
    return known


@pytest.mark.fault(22)
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_publisher_is_killed_at_any_moment(tmp_path: Path, *, remote: bool) -> None:
    """Into its own store, and into a remote origin: readers keep what they have, the next wins."""
    rng = random.Random(22)
    seeds = (1, 2, 3, 4, 5, 6, 99)
    whole = directories({seed: tmp_path / f"{seed}" for seed in (0, *seeds)})
    for seed in (0, *seeds):
        small_checkpoint(tmp_path / f"{seed}", size=24 * MiB, seed=seed)
    steps: dict[int, int] = {}

    with tree(tmp_path) as made:

        def truth(version: int) -> Mapping[str, str] | None:
            """Whatever readers see, at any moment, is the checkpoint of that step, whole."""
            step = steps_of(made, steps).get(version)
            return None if step is None else whole(step)

        def publish(seed: int) -> Process:
            steps_of(made, steps)  # the head forgets the oldest
            argv = shardcast(
                "publish", tmp_path / f"{seed}", "--run", made.run, *there, "--step", str(seed),
                "--key", made.keys / "shardcast.key", "--json",
            )  # fmt: skip
            return made.processes.start(argv, name=f"publish-{seed}")

        with criteria(truth) as verdict:
            token = tmp_path / "token"
            token.write_text("a-token-that-is-long-enough\n")
            made.publish(tmp_path / "0", "--step", "0")
            origin = made.origin("--publish-token-file", str(token))
            relay = made.relay("relay", parents=[origin.url])
            follower = made.follow("out", sources=[relay.url])
            verdict.watch(follower.out, relay.store / made.run)
            follower.wait_committed(1, timeout=60)
            there: list[str | Path] = (
                ["--to", origin.url, "--token-file", token] if remote else ["--store", made.store]
            )
            for seed in seeds[:-1]:
                doomed = publish(seed)
                doomed.watch_exit(rng.uniform(0.1, 0.7))
                doomed.kill()
                doomed.watch_exit(30)
            process = publish(seeds[-1])
            done = int(process.wait_event("published", timeout=60)["version"])
            process.check(timeout=30)
            follower.wait_committed(done, timeout=60)
            assert steps_of(made, steps)[done] == seeds[-1]
            verdict.watch(made.store / made.run)  # by now no version there waits for its head
            verdict.waive("b", "no source is at fault")
            verdict.waive("c", "nobody else reads")
            verdict.waive("d", "nothing failed on the way to the reader")
            verdict.recovered(follower.out, done)
