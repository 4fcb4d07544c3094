"""NaN and infinities are found in every type that has them, named, and never published."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcast import finite
from shardcast.errors import MalformedError, ModifiedError, NonFiniteError
from shardcast.finite import FORMATS, first_bad, refuse_nonfinite
from tests.unit.safetensors import safetensors

NAN_32 = struct.pack("<f", float("nan"))
INF_32 = struct.pack("<f", float("-inf"))


def check(path: Path) -> None:
    refuse_nonfinite([(path.name, path, path.stat().st_size)], threads=2)


def one(tmp_path: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        safetensors({"first": ("I8", [3], b"\xff\x7f\x80"), "w": (dtype, shape, data)})
    )
    return path


# Every code of the small types, by what other formats or their specifications say of it.
HALF = np.arange(1 << 16, dtype=np.uint16)
BF16_AS_F32 = (HALF.astype(np.uint32) << 16).view(np.float32)
E5M2_AS_F16 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16)
WRONG = {
    "BF16": {int(code) for code in HALF[~np.isfinite(BF16_AS_F32)]},
    "F16": {int(code) for code in HALF[~np.isfinite(HALF.view(np.float16))]},
    "F8_E5M2": set(np.flatnonzero(~np.isfinite(E5M2_AS_F16)).tolist()),
    "F8_E4M3": {0x7F, 0xFF},  # OCP 8-bit Floating Point Specification, table 1
    "F8_E8M0": {0xFF},  # OCP Microscaling Formats, section 5.4.1
    "F8_E4M3FNUZ": {0x80},  # LLVM's Float8E4M3FNUZ: no infinities, one NaN
    "F8_E5M2FNUZ": {0x80},
}


@pytest.mark.parametrize("dtype", WRONG)
def test_every_code_of_the_small_types(dtype: str) -> None:
    form = FORMATS[dtype]
    width = form.width
    for code in range(1 << (8 * width)):
        data = memoryview(code.to_bytes(width, "little"))
        assert (first_bad(data, form) is not None) == (code in WRONG[dtype]), hex(code)


@pytest.mark.parametrize(("dtype", "kind"), [("F32", np.float32), ("F64", np.float64)])
def test_the_large_types_as_numpy_says(dtype: str, kind: type) -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        values: np.ndarray[Any, Any] = np.frombuffer(
            rng.bytes(kind().itemsize * 64), dtype=kind
        ).copy()
        if rng.integers(2):
            values[rng.integers(64)] = rng.choice([np.nan, np.inf, -np.inf, 0.0])
        expected = np.flatnonzero(~np.isfinite(values))
        found = first_bad(memoryview(values.tobytes()), FORMATS[dtype])
        assert found == (int(expected[0]) if expected.size else None)


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "said"),
    [
        (
            "F32",
            [2, 3],
            b"\0" * 16 + NAN_32 + b"\0" * 4,
            r"'w' in model.safetensors.* NaN at \[1, 1\]",
        ),
        ("F32", [2, 3], b"\0" * 20 + INF_32, r"-Inf at \[1, 2\]"),
        ("BF16", [3], b"\0\0\x80\x7f\0\0", r" Inf at \[1\]"),
        ("F64", [], struct.pack("<d", float("nan")), r"NaN at \[\]"),
        ("F8_E4M3", [4], b"\0\0\0\x7f", r"NaN at \[3\]"),
        ("C64", [2], b"\0" * 12 + NAN_32, r"NaN at \[1\]"),
    ],
)
def test_the_message_names_tensor_file_place_and_value(
    tmp_path: Path, dtype: str, shape: list[int], data: bytes, said: str
) -> None:
    with pytest.raises(NonFiniteError, match=said):
        check(one(tmp_path, dtype, shape, data))


def test_whole_numbers_may_be_anything(tmp_path: Path) -> None:
    check(one(tmp_path, "U8", [4], b"\xff\x7f\xff\xff"))


def test_the_first_one_is_named_across_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "PIECE_BYTES", 64)
    values = np.zeros((9, 11), dtype=np.float32)
    values[7, 3] = values[8, 10] = np.inf
    with pytest.raises(NonFiniteError, match=r"\[7, 3\]"):
        check(one(tmp_path, "F32", [9, 11], values.tobytes()))
    values[:] = 1.0
    check(one(tmp_path, "F32", [9, 11], values.tobytes()))


def test_what_is_no_safetensors_file_is_not_taken_for_good(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(MalformedError, match="is none"):
        check(path)


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({}))
    check(path)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    path = one(tmp_path, "F32", [4], b"\0" * 16)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModifiedError):
        refuse_nonfinite([(path.name, path, size)])
