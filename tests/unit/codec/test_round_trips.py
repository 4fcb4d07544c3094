"""Whatever the bytes are, they come back bit for bit."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.codec import kernel
from shardcast.codec.decode import decode_frame
from shardcast.codec.elements import SAFETENSORS, ElementType
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import BaseRange
from tests.unit.codec.made import NOTHING, Files, cost, safetensors

SPECIAL = {
    ElementType.BFLOAT16: (
        "<u2",
        [0x8000, 0, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 1, 0x8001, 0x7F],
    ),
    ElementType.FLOAT16: ("<u2", [0x8000, 0, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 1, 0x83FF]),
    ElementType.FLOAT32: (
        "<u4",
        [0x80000000, 0, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1],
    ),
    ElementType.FLOAT64: ("<u8", [1 << 63, 0, 0x7FF0 << 48, 0xFFF0 << 48, (1 << 64) - 1, 1]),
    ElementType.FLOAT8_E4M3: ("u1", [0x80, 0, 0x7F, 0xFF, 1, 0x81, 0x7E]),
    ElementType.FLOAT8_E5M2: ("u1", [0x80, 0, 0x7C, 0xFC, 0x7E, 0xFF, 1]),
}
"""Negative zero, zero, infinities, NaNs with payloads, subnormals."""


def frame_of(new: bytes, old: bytes, kind: ElementType) -> bytes:
    return encode_frame(memoryview(new), [Piece(len(new), kind, BaseRange(0, 0))], Files([old]))


@given(kind=st.sampled_from(ElementType), data=st.data())
def test_any_bytes_from_any_base(kind: ElementType, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 300)) * kind.width
    seed = data.draw(st.integers(0, 1 << 32))
    old = random.Random(seed).randbytes(count)
    new = bytearray(old)
    edits = st.tuples(st.integers(0, max(count - 1, 0)), st.binary(min_size=1, max_size=20))
    for at, edit in data.draw(st.lists(edits, max_size=20)):
        new[at : at + len(edit)] = edit[: count - at]
    frame = frame_of(bytes(new), old, kind)
    assert decode_frame(frame, count, Files([old])) == new
    alone = encode_frame(memoryview(new), [Piece(count, kind)], NOTHING)
    assert decode_frame(alone, count, NOTHING) == new


@pytest.mark.parametrize("kind", SPECIAL)
def test_every_special_value_becomes_every_other(kind: ElementType) -> None:
    dtype, values = SPECIAL[kind]
    old = np.repeat(np.array(values, dtype), len(values)).tobytes()
    new = np.tile(np.array(values, dtype), len(values)).tobytes()
    assert decode_frame(frame_of(new, old, kind), len(new), Files([old])) == new
    # ... also rare among ordinary weights, where changes are listed
    ordinary = np.random.default_rng(1).integers(0, 256, 40_000 * kind.width, np.uint8)
    many_old, many_new = ordinary.tobytes() + old, ordinary.tobytes() + new
    assert (
        decode_frame(frame_of(many_new, many_old, kind), len(many_new), Files([many_old]))
        == many_new
    )


@pytest.mark.parametrize("kind", ElementType)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.5, 1.0])
def test_every_path_of_the_kernel_writes_and_reads_the_same(
    kind: ElementType, density: float
) -> None:
    rng = np.random.default_rng(7)
    count = 20_000 + 17
    old = rng.normal(0, 0.02, count * kind.width // 4 + 8).astype(np.float32).tobytes()
    old = old[1 : 1 + count * kind.width]  # unaligned
    new = np.frombuffer(old, np.uint8).copy().reshape(count, kind.width)
    new[rng.random(count) < density, 0] ^= 1
    pieces = [(old, 0, new.tobytes(), 0, count)]
    taken: list[bytes | None] = []
    for path in range(3):
        before = kernel.use_path(path)
        try:
            taken.append(kernel.encode_changes(kind, pieces, count))
        finally:
            kernel.use_path(before)
    assert taken[0] == taken[1] == taken[2]
    frame = frame_of(new.tobytes(), old, kind)
    for path in range(3):
        before = kernel.use_path(path)
        try:
            assert frame_of(new.tobytes(), old, kind) == frame
            assert decode_frame(frame, new.nbytes, Files([old])) == new.tobytes()
        finally:
            kernel.use_path(before)


@pytest.mark.parametrize("dtype", [*SAFETENSORS, "I8", "U8", "BOOL", "F4", "F8_E8M0"])
@pytest.mark.parametrize("frame_bytes", [1000, 1001, 4099])
def test_frames_begin_and_end_anywhere(dtype: str, frame_bytes: int) -> None:
    rng = np.random.default_rng(3)
    data = rng.normal(0, 0.02, 4000).astype(np.float32).tobytes()
    new = bytearray(data)
    for at in rng.integers(0, len(data), 50):
        new[int(at)] ^= 1
    old_file = safetensors({"a": (dtype, data[:8000]), "b": (dtype, data[8000:])})
    new_file = safetensors({"a": (dtype, bytes(new[:8000])), "b": (dtype, bytes(new[8000:]))})
    cost(new_file, [old_file], frame_bytes=frame_bytes)


@pytest.mark.parametrize(
    "texts",
    [
        (b"", b""),
        (b"", b"x"),
        (b"x", b""),
        (b"a" * 7, b"a" * 8),
        (b"{}" * 3000, b"{}" * 2999 + b"[]"),
        (bytes(range(256)) * 40, b"\0" + bytes(range(256)) * 40),
    ],
)
def test_files_that_are_no_tensors(texts: tuple[bytes, bytes]) -> None:
    old, new = texts
    cost(new, [old])
    cost(new, [])


def test_a_file_without_a_base_and_an_empty_one() -> None:
    data = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32).tobytes()
    cost(safetensors({"a": ("F32", data)}), [])
    cost(b"", [])


def test_more_tensors_than_a_frame_has_segments() -> None:
    # 80,000 tensors of one element, in another order than before: every one from somewhere else.
    size = 80_000
    old = np.arange(size, dtype=np.uint16).tobytes()
    new = np.arange(size, dtype=np.uint16)[::-1].tobytes()
    pieces = [Piece(2, ElementType.BFLOAT16, BaseRange(0, 2 * (size - 1 - k))) for k in range(size)]
    frame = encode_frame(memoryview(new), pieces, Files([old]))
    assert decode_frame(frame, len(new), NOTHING) == new


def test_a_long_list_of_changes_is_cut() -> None:
    rng = np.random.default_rng(5)
    old = rng.integers(0, 256, 6 << 20, np.uint8)
    new = old + (rng.random(len(old)) < 0.3)
    new = new.astype(np.uint8)
    frame = frame_of(new.tobytes(), old.tobytes(), ElementType.BYTES)
    assert decode_frame(frame, len(new), Files([old.tobytes()])) == new.tobytes()
    assert len(frame) < 0.3 * len(new)


def test_pieces_must_fill_the_frame_with_whole_elements() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        encode_frame(memoryview(b"1234"), [Piece(2)], NOTHING)
    with pytest.raises(ValueError, match="within an element"):
        encode_frame(memoryview(b"123"), [Piece(3, ElementType.INT16)], NOTHING)
