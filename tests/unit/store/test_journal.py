"""The shard journal's bytes, built here by hand from docs/PROTOCOL.md."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from shardcast.errors import DiskError
from shardcast.store.journal import ShardJournal, parse_journal

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
