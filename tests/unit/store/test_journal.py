"""The shard journal's bytes, built here by hand from docs/PROTOCOL.md."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import xxhash

from shardcast.errors import DiskError
from shardcast.store.journal import SPARE_RECORDS, ShardJournal, parse_journal

LAYOUT = "ab" * 32
GOLDEN_CHECK = "005b5fd7"  # little-endian


def record(shard: int, xxh3: bytes) -> bytes:
    check = xxhash.xxh32(struct.pack("<I", shard) + xxh3, seed=0).intdigest()
    return struct.pack("<II", shard, check) + xxh3


def test_the_bytes_are_those_of_the_specification(tmp_path: Path) -> None:
    journal = ShardJournal(tmp_path / "j", LAYOUT, 10)
    one, two = bytes(range(16)), bytes(range(16, 32))
    journal.append(3, one)
    journal.extend({4: two, 9: one})
    journal.forget(4)
    journal.forget(4)
    journal.sync()
    journal.close()
    expected = b"SHDJRNL1" + bytes.fromhex(LAYOUT)
    expected += record(3, one) + record(4, two) + record(9, one) + record(4, bytes(16))
    assert (tmp_path / "j").read_bytes() == expected
    assert ShardJournal(tmp_path / "j", LAYOUT, 10).entries == {3: one, 9: one}


def test_golden_bytes_of_one_record() -> None:
    # xxh32 of 01000000 followed by 16 bytes of 07, by the xxh32sum program
    data = b"SHDJRNL1" + bytes.fromhex(LAYOUT)
    data += bytes.fromhex("01000000" + GOLDEN_CHECK + "07" * 16)
    assert parse_journal(data, LAYOUT, 2) == {1: bytes([7] * 16)}


def test_torn_damaged_foreign_and_out_of_range_records_are_passed_over() -> None:
    head = b"SHDJRNL1" + bytes.fromhex(LAYOUT)
    good, late = record(1, b"a" * 16), record(2, b"b" * 16)
    flipped = bytes([good[0] ^ 2]) + good[1:]
    data = head + good + flipped + record(7, b"c" * 16) + late[:-1]
    assert parse_journal(data, LAYOUT, 7) == {1: b"a" * 16}
    assert parse_journal(data, "cd" * 32, 7) is None
    assert parse_journal(b"", LAYOUT, 7) is None
    assert parse_journal(head[:-1], LAYOUT, 7) is None
    assert parse_journal(head, LAYOUT, 7) == {}


def test_a_torn_tail_is_cut_before_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "j"
    head = b"SHDJRNL1" + bytes.fromhex(LAYOUT)
    path.write_bytes(head + record(1, b"a" * 16) + b"torn")
    journal = ShardJournal(path, LAYOUT, 5)
    journal.append(2, b"b" * 16)
    journal.close()
    assert path.read_bytes() == head + record(1, b"a" * 16) + record(2, b"b" * 16)


def test_a_journal_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    journal = ShardJournal(tmp_path / "j", LAYOUT, 5)
    journal.path = tmp_path / "file" / "j"
    with pytest.raises(DiskError):
        journal.append(1, b"a" * 16)
    journal.sync()
    journal.close()


def test_a_journal_is_bounded_and_keeps_what_it_said(tmp_path: Path) -> None:
    path, shards = tmp_path / "state" / "1.shards", 10
    journal = ShardJournal(path, LAYOUT, shards)
    most = 40 + 24 * (2 * shards + SPARE_RECORDS)
    for turn in range(SPARE_RECORDS):
        journal.append(turn % shards, turn.to_bytes(16, "big"))
        journal.append(shards - 1, b"x" * 16)
        journal.forget(shards - 1)
        assert path.stat().st_size <= most
    expected = dict(journal.entries)
    assert len(expected) == shards - 1
    journal.close()
    assert ShardJournal(path, LAYOUT, shards).entries == expected
    assert not list(path.parent.glob(".*.tmp"))


def test_a_journal_that_cannot_be_rewritten_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "1.shards"
    journal = ShardJournal(path, LAYOUT, 1)
    tries: list[str] = []

    def refuse(source: str, target: str) -> None:
        tries.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    for turn in range(1, 2 * SPARE_RECORDS):
        journal.append(0, turn.to_bytes(16, "big"))
    assert len(tries) == 1  # not at every record
    monkeypatch.undo()
    for turn in range(1, 2 * SPARE_RECORDS):
        journal.append(0, turn.to_bytes(16, "big"))
    assert path.stat().st_size < 40 + 24 * 2 * SPARE_RECORDS  # it was rewritten meanwhile
    journal.close()
    assert ShardJournal(path, LAYOUT, 1).entries == journal.entries
