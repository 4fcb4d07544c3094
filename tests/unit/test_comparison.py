"""Two directories compared: which tensors, how many elements, what it costs; what moved or left."""

import random
import struct
from pathlib import Path

import pytest

from shardcast.codec.decode import decode_frame
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import BaseRange
from shardcast.comparison import Comparison, compare_directories
from shardcast.errors import UsageError
from shardcast.tensor_changes import Row
from tests.unit.safetensors import safetensors, write


def bf16(count: int, seed: int) -> bytes:
    """Numbers around 0.02, as weights are."""
    rng = random.Random(seed)
    return b"".join(struct.pack("<f", rng.gauss(0, 0.02))[2:] for _ in range(count))


def stepped(data: bytes, count: int, seed: int) -> bytes:
    """The same numbers, `count` of them moved to a neighbour."""
    new = bytearray(data)
    for element in random.Random(seed).sample(range(len(data) // 2), count):
        new[2 * element] ^= 1
    return bytes(new)


A, B = bf16(200_000, 1), bf16(50_000, 2)


def pair(tmp_path: Path, old: dict[str, bytes], new: dict[str, bytes]) -> Comparison:
    return compare_directories(write(tmp_path / "a", old), write(tmp_path / "b", new), threads=2)


def row(found: Comparison, name: str) -> Row:
    (one,) = [r for r in (*found.changes.tensors, *found.changes.others) if r.name == name]
    return one


def test_changed_elements_are_counted_by_tensor(tmp_path: Path) -> None:
    old = {"m": safetensors({"a": ("BF16", [200_000], A), "b": ("BF16", [50, 1000], B)})}
    a, b = stepped(A, 900, 3), stepped(B, 7, 4)
    new = {"m": safetensors({"a": ("BF16", [200_000], a), "b": ("BF16", [50, 1000], b)})}
    found = pair(tmp_path, old, new)
    assert (row(found, "a").changed, row(found, "a").compared) == (900, 200_000)
    assert (row(found, "b").changed, row(found, "b").elements) == (7, 50_000)
    assert row(found, "a").density == 900 / 200_000
    assert row(found, "a").codec == "changes"
    assert row(found, "b").shape == (50, 1000)
    assert {r.change for r in found.changes.tensors} == {"changed"}
    assert row(found, "m").change == "same"
    assert 0 < found.changes.wire_bytes < 2000
    told = sum(r.wire_bytes for r in found.changes.tensors)
    assert abs(told + found.changes.framing - found.changes.wire_bytes) <= 2
    assert row(found, "a").wire_bytes > 50 * row(found, "b").wire_bytes


def test_equal_directories_cost_nothing_but_the_frames(tmp_path: Path) -> None:
    files = {"m": safetensors({"a": ("BF16", [200_000], A)}), "config.json": b"{}"}
    found = pair(tmp_path, files, files)
    assert found.changes.wire_bytes == found.changes.framing < 100
    assert {r.change for r in (*found.changes.tensors, *found.changes.others)} == {"same"}
    assert row(found, "a").ratio is None
    assert row(found, "a").codec == "-"


def test_what_was_added_removed_moved_resized_or_retyped_is_said(tmp_path: Path) -> None:
    same = ("BF16", [50_000], B)
    old = {
        "one": safetensors({"kept": same, "gone": ("U8", [3], b"abc")}),
        "two": safetensors({"typed": ("BF16", [100], A[:200]), "grown": ("BF16", [9], A[:18])}),
        "old.txt": b"bye",
    }
    new = {
        "one": safetensors({"new": ("BF16", [1000], A[-2000:])}),
        "two": safetensors(
            {
                "kept": same,
                "typed": ("F32", [100], bytes(400)),
                "grown": ("BF16", [10], A[:20]),
            }
        ),
        "new.txt": b"hello",
    }
    found = pair(tmp_path, old, new)
    assert {r.name: r.change for r in found.changes.tensors} == {
        "new": "added",
        "kept": "same",
        "typed": "retyped",
        "grown": "changed",
        "gone": "removed",
    }
    assert {r.name for r in found.changes.tensors if r.moved} == {"kept", "typed", "grown"}
    assert {r.name for r in found.changes.tensors if r.resized} == {"typed", "grown"}
    assert (row(found, "typed").old_dtype, row(found, "typed").density) == ("BF16", None)
    assert row(found, "kept").wire_bytes == 0
    assert row(found, "new").wire_bytes > 500
    assert (row(found, "grown").compared, row(found, "grown").changed) == (9, 0)
    assert row(found, "new.txt").change == "added"
    assert found.removed == ("old.txt",)


def test_a_header_that_grew_moves_all_and_costs_little(tmp_path: Path) -> None:
    tensors = {"a": ("BF16", [200_000], A)}
    found = pair(tmp_path, {"m": safetensors(tensors)}, {"m": safetensors(tensors, pad=8)})
    assert (row(found, "a").moved, row(found, "a").change) == (True, "same")
    assert row(found, "m").change == "changed"
    assert found.changes.wire_bytes < 300


def test_what_does_not_compress_travels_as_it_is(tmp_path: Path) -> None:
    old, new = random.Random(1).randbytes(300_000), random.Random(2).randbytes(300_000)
    found = pair(tmp_path, {"x": old}, {"x": new})
    assert row(found, "x").codec == "shards"
    assert found.changes.wire_bytes == 300_000
    assert row(found, "x").changed > 290_000


def test_more_files_and_frames_than_one(tmp_path: Path) -> None:
    big = random.Random(3).randbytes(1 << 20) * 20  # over one frame
    other = bytearray(big)
    for at in (0, 17 << 20, len(big) - 1):
        other[at] ^= 255
    old = {"m": safetensors({"t": ("U8", [len(big)], big)}), "n": b"n" * 5, "e": b""}
    new = {"m": safetensors({"t": ("U8", [len(big)], bytes(other))}), "n": b"N" * 5, "e": b""}
    found = pair(tmp_path, old, new)
    assert (row(found, "t").changed, row(found, "t").compared) == (3, len(big))
    assert (row(found, "n").changed, row(found, "n").elements) == (5, 5)
    assert found.bytes == found.base_bytes == sum(map(len, new.values()))


def test_the_cost_is_that_of_frames_that_rebuild(tmp_path: Path) -> None:
    class Old:
        def range(self, file: int, offset: int, length: int) -> memoryview:
            return memoryview(A)[offset : offset + length]

    new = stepped(A, 500, 9)
    found = pair(tmp_path, {"x": A}, {"x": new})
    piece = Piece(len(new), base=BaseRange(0, 0), text=True)
    frame = encode_frame(memoryview(new), [piece], Old())
    assert found.changes.wire_bytes == len(frame)
    assert bytes(decode_frame(frame, len(new), Old())) == new


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_path_that_is_no_directory_is_a_usage_error(tmp_path: Path, missing: str) -> None:
    for name in {"a", "b"} - {missing}:
        write(tmp_path / name, {"x": b"x"})
    (tmp_path / missing).write_bytes(b"a file")
    with pytest.raises(UsageError, match="is not a directory"):
        compare_directories(tmp_path / "a", tmp_path / "b")
