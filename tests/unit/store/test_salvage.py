"""A journal that was lost: the bytes themselves are asked."""

from __future__ import annotations

import os
from pathlib import Path

from shardcast.salvage import salvage
from shardcast.store.run import RunStore
from tests.unit.store.conftest import Sample


def lose_journal(run: RunStore) -> RunStore:
    run.close()
    (run.root / "state" / "000001.shards").unlink()
    return RunStore(run.root, run.run)


def test_good_bytes_are_recorded_again(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    again = lose_journal(run)
    stored = again.stored(1)
    assert stored is not None
    assert stored.damaged == "version 1 lacks 4 shards"
    assert salvage(stored) == 4
    assert stored.complete
    last = RunStore(run.root, run.run).stored(1)
    assert last is not None
    assert all(last.confirm(shard) for shard in range(4))


def test_bad_and_missing_bytes_are_not(run: RunStore, sample: Sample) -> None:
    sample.fill(run)
    run.commit(1)
    again = lose_journal(run)
    directory: Path = again.version_directory(1)
    with open(directory / "a/model.safetensors", "r+b") as file:
        file.seek(300 * 1024)
        file.write(os.urandom(8))
    (directory / "config.json").unlink()
    stored = again.stored(1)
    assert stored is not None
    assert salvage(stored) == 2
    assert stored.missing() == [1, 3]
    assert salvage(stored) == 0


def test_a_staged_version_is_salvaged_where_somebody_wrote(run: RunStore, sample: Sample) -> None:
    sample.write_documents(run)
    stored = run.stage(sample.version)
    assert salvage(stored) == 0  # nobody wrote anything: it is not even read
    assert not any(stored.written(shard) for shard in range(4))
    with open(stored.directory / "a/model.safetensors", "r+b") as file:
        file.write(sample.shard(0) + b"half")
    assert [stored.written(shard) for shard in range(4)] == [True, True, False, False]
    assert salvage(stored) == 1
    assert stored.missing() == [1, 2, 3]
