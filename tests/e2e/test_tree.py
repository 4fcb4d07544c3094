"""A whole tree: what was published stands at every worker, byte for byte, whatever was killed."""

import itertools
from pathlib import Path

import pytest

from loadtest.checkpoints import bytes_below, write_step
from loadtest.documents import Reach, get, head_of, head_url, reach
from loadtest.scripted_parent import ScriptedParent
from tests.tree import Tree, assert_same_files, last, small_checkpoint, tree, wait_all

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TIMEOUT_S = 60.0


def reach_of_export(exported: Path, run: str) -> Reach:
    root = exported / "v1" / run
    head = head_of((root / "head").read_bytes())
    return reach(head, lambda digest: (root / "blobs" / f"{digest}.bin").read_bytes())


def test_three_workers_behind_three_tiers_hold_what_was_published(tmp_path: Path) -> None:
    first = small_checkpoint(tmp_path / "first")
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        second = made.siblings(["relay0", "relay1"], parents=[origin.url])
        third = made.relay("third", parents=[relay.url for relay in second])
        workers = [made.follow(f"worker{n}", sources=[third.url]) for n in range(3)]

        published = made.publish(first, "--step", "7")
        ready = wait_all(workers, published.version, timeout=TIMEOUT_S)
        assert {event["step"] for event in ready} == {7}
        assert {event["manifest"] for event in ready} == {published.event["manifest"]}
        for worker in workers:
            worker.wait_committed(published.version, timeout=TIMEOUT_S)
            assert_same_files(first, worker.current)


def test_followers_move_on_to_the_next_version(tmp_path: Path) -> None:
    first = small_checkpoint(tmp_path / "first")
    second = small_checkpoint(tmp_path / "second")
    write_step(first, second)
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        relay = made.relay("relay", parents=[origin.url])
        worker = made.follow("worker", sources=[relay.url])
        one = made.publish(first)
        worker.wait_committed(one.version, timeout=TIMEOUT_S)
        two = made.publish(second)
        worker.wait_committed(two.version, timeout=TIMEOUT_S)
        assert two.version > one.version
        assert_same_files(second, worker.current)


def test_an_unchanged_file_is_not_fetched_again(tmp_path: Path) -> None:
    """One weight file of three changes: the others come from the version already there."""
    first = small_checkpoint(tmp_path / "first")
    second = small_checkpoint(tmp_path / "second")
    changed = sorted(second.glob("*.safetensors"))[0]
    data = bytearray(changed.read_bytes())
    for at in range(len(data) // 2, len(data), 4096):
        data[at] ^= 1
    changed.write_bytes(data)
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        worker = made.follow("worker", sources=[origin.url])
        worker.wait_committed(made.publish(first).version, timeout=TIMEOUT_S)
        event = worker.wait_ready(made.publish(second).version, timeout=TIMEOUT_S)
        assert 0 < event["bytes_fetched"] < len(data)


def exported_version(made: Tree, tmp_path: Path) -> tuple[Path, Path, str, list[str]]:
    """Publishes and exports a checkpoint.

    Returns the source, the export, a shard of weights out of the middle, and the other shards.
    """
    source = small_checkpoint(tmp_path / "source")
    made.publish(source)
    exported = made.export(tmp_path / "exported")
    shards = list(reach_of_export(exported, made.run).shards)
    victim = shards.pop(len(shards) // 2)
    return source, exported, victim, shards


def test_a_killed_pull_fetches_only_what_was_missing(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        source, exported, victim, others = exported_version(made, tmp_path)
        out = tmp_path / "out"
        with ScriptedParent(exported, made.run, victim=victim, pause_at=1000) as parent:
            broken = made.start_pull("broken", out, sources=[parent.url])
            parent.wait_sent(others, timeout=TIMEOUT_S)
            broken.kill()
            sent_before = len(parent.sent)
            parent.released.set()
            event = last(made.pull(out, sources=[parent.url]), "committed")
            again = set(parent.sent[sent_before:]) & set(others)
        assert_same_files(source, (out / "current").resolve(strict=True))
        # The kill may lose what was in flight or not yet noted, never the bulk.
        assert len(again) <= len(others) // 2
        assert event["bytes_fetched"] < bytes_below(source) / 2


def test_a_killed_relay_fetches_only_what_was_missing(tmp_path: Path) -> None:
    with tree(tmp_path / "tree") as made:
        source, exported, victim, others = exported_version(made, tmp_path)
        with ScriptedParent(exported, made.run, victim=victim, pause_at=1000) as parent:
            relay = made.relay("relay", parents=[parent.url])
            parent.wait_sent(others, timeout=TIMEOUT_S)
            relay.process.kill()
            sent_before = len(parent.sent)
            parent.released.set()
            relay = made.relay("relay", parents=[parent.url])
            out = tmp_path / "out"
            made.pull(out, sources=[relay.url])
            again = set(parent.sent[sent_before:]) & set(others)
        assert_same_files(source, (out / "current").resolve(strict=True))
        assert len(again) <= len(others) // 2


def test_an_origin_that_listens_knows_what_its_store_holds(tmp_path: Path) -> None:
    """No 404 for a published run between `listening` and the first look at the store."""
    with tree(tmp_path / "tree") as made:
        published = made.publish(small_checkpoint(tmp_path / "source"))
        head = head_of(get(head_url(made.origin().url, made.run)))
        assert head["version"] == published.version


def test_a_restarted_relay_serves_without_its_parent(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "source")
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        relay = made.relay("relay", parents=[origin.url])
        made.publish(source)
        made.pull(tmp_path / "before", sources=[relay.url])
        assert relay.process.stop()
        assert origin.process.stop()
        relay = made.relay("relay", parents=[origin.url])
        made.pull(tmp_path / "after", sources=[relay.url])
        for out in ("before", "after"):
            assert_same_files(source, (tmp_path / out / "current").resolve(strict=True))


def test_versions_published_quickly_end_at_the_newest(tmp_path: Path) -> None:
    """Newest wins: a follower may skip versions, and ends at the last one."""
    with tree(tmp_path / "tree") as made:
        origin = made.origin()
        worker = made.follow("worker", sources=[origin.url])
        sources = [small_checkpoint(tmp_path / f"v{n}", seed=n) for n in range(4)]
        versions = [made.publish(source).version for source in sources]
        worker.wait_committed(versions[-1], timeout=TIMEOUT_S)
        assert all(a < b for a, b in itertools.pairwise(versions))
        assert_same_files(sources[-1], worker.current)
