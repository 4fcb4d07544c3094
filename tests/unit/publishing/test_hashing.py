"""Hashing on all cores: what is hashed is what is written, and the first error wins."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import xxhash
from blake3 import blake3

from shardcast.errors import DiskError, ModifiedError
from shardcast.hashing import ShardJob, default_threads, hash_shards


def test_hashes_come_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    data = os.urandom(3_000_001)
    source.write_bytes(data)
    target.write_bytes(bytes(len(data)))
    pieces = [(0, 1_500_000), (1_500_000, 1_500_000), (3_000_000, 1)]
    jobs = [ShardJob(source, offset, length, target) for offset, length in pieces]
    counted: list[int] = []
    found = hash_shards(jobs, threads=3, progress=counted.append)
    for (offset, length), result in zip(pieces, found, strict=True):
        piece = data[offset : offset + length]
        assert result.digest == blake3(piece).hexdigest()
        assert result.xxh3 == xxhash.xxh3_128_digest(piece)
    assert target.read_bytes() == data
    assert sum(counted) == len(data)


def test_no_jobs_give_no_hashes() -> None:
    assert hash_shards([]) == []
    assert default_threads() >= 1


def test_a_short_source_is_a_modified_file(tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.write_bytes(b"short")
    with pytest.raises(ModifiedError, match="shrank to 5 bytes"):
        hash_shards([ShardJob(source, 0, 100)])


def test_a_missing_source_or_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="gone"):
        hash_shards([ShardJob(tmp_path / "gone", 0, 1)])
    source = tmp_path / "s"
    source.write_bytes(b"x")
    with pytest.raises(DiskError, match="nowhere"):
        hash_shards([ShardJob(source, 0, 1, tmp_path / "nowhere")])


def test_an_interrupt_stops_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "s"
    source.write_bytes(bytes(8 << 20))
    jobs = [ShardJob(source, 0, 8 << 20) for _ in range(1000)]
    before = threading.active_count()

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            super().join(timeout)

    stopped: list[bool] = []
    monkeypatch.setattr("shardcast.sharing.threading.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        hash_shards(jobs, threads=2)
    assert threading.active_count() == before
