"""Frames from anyone: refused, or decoded to bytes that a digest judges; never more memory than declared."""

import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shardcast.codec import kernel
from shardcast.codec.decode import decode_frame, decode_frame_into
from shardcast.codec.elements import ElementType
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import (
    MAX_FRAME_BYTES,
    MAX_GROUPS,
    MAX_SEGMENTS,
    BaseRange,
    Group,
    Mode,
    Segment,
    read_frame,
    write_frame,
)
from shardcast.errors import LimitError, MalformedError
from tests.unit.codec.made import NOTHING, Files, encode_file, moved, safetensors, weights


def _good_frames() -> list[tuple[bytes, int, Files]]:
    rng = np.random.default_rng(8)
    codes = weights(rng, 3000)
    small = rng.integers(-2, 2, 3000, np.int8).view(np.uint8)
    flags = small ^ (1 << rng.integers(0, 8, 3000)).astype(np.uint8)
    before = {
        "a": ("BF16", codes.tobytes()),
        "b": ("I32", rng.bytes(800)),
        "c": ("I8", bytes(900)),
        "e": ("F8_E4M3", small.tobytes()),
        "f": ("U8", small.tobytes()),
    }
    after = {
        "a": ("BF16", moved(rng, codes, 0.02).tobytes()),
        "b": ("I32", rng.bytes(800)),
        "c": ("I8", bytes(range(225)) * 4),
        "e": ("F8_E4M3", (small + 1).tobytes()),
        "f": ("U8", flags.tobytes()),
        "d": ("BF16", moved(rng, codes, 1).tobytes()),
    }
    old, new = safetensors(before), safetensors(after)
    text = b'{"some": "text"} ' * 100
    frames = [(frame, len(new), Files([old])) for frame in encode_file(new, [old])]
    frames += [(frame, len(text), NOTHING) for frame in encode_file(text, [])]
    return frames


GOOD = _good_frames()


def attempt(frame: bytes, size: int, base: Files) -> bytes | None:
    try:
        return bytes(decode_frame(frame, size, base))
    except (MalformedError, LimitError):
        return None


@pytest.mark.parametrize("index", range(len(GOOD)))
def test_damage_is_refused_or_gives_as_many_bytes(index: int) -> None:
    frame, size, base = GOOD[index]
    rng = random.Random(index)
    good = attempt(frame, size, base)
    assert good is not None
    refused = 0
    for _ in range(3000):
        damaged = bytearray(frame)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            match rng.randrange(3):
                case 0:
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                case 1:
                    del damaged[rng.randrange(len(damaged))]
                case _:
                    damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255])
            if len(damaged) < 2:
                break
        found = attempt(bytes(damaged), size, base)
        refused += found is None
        assert found is None or len(found) == size
    assert refused > 300  # the rest fell on bytes that are stored as they are
    for cut in range(len(frame)):
        assert attempt(frame[:cut], size, base) is None
    assert attempt(frame + b"\0", size, base) is None


@given(frame=st.binary(max_size=300).map(lambda tail: b"SCF1" + tail), size=st.integers(0, 300))
def test_any_bytes_are_a_frame_or_refused(frame: bytes, size: int) -> None:
    attempt(frame, size, Files([bytes(range(256))]))
    attempt(frame[4:], size, NOTHING)


@given(data=st.data())
def test_any_header_over_any_payload(data: st.DataObject) -> None:
    """Well-formed headers reach what is behind them."""
    count = data.draw(st.integers(1, 4))
    groups = [
        Group(
            data.draw(st.sampled_from(Mode)),
            data.draw(st.sampled_from(ElementType)),
            data.draw(st.binary(max_size=60)),
        )
        for _ in range(count)
    ]
    segments = []
    for _ in range(data.draw(st.integers(0, 5))):
        group = data.draw(st.integers(0, count - 1))
        base = BaseRange(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 70)))
        based = groups[group].mode.based
        length = data.draw(st.integers(0, 64))
        segments.append(Segment(length, group, base if based else None))
    frame = write_frame(groups, segments)
    size = sum(segment.length for segment in segments)
    found = attempt(frame, size, Files([bytes(100), b"ab" * 40]))
    assert found is None or len(found) == size


def _one(mode: Mode, kind: ElementType, payload: bytes, length: int) -> bytes:
    base = BaseRange(0, 0) if mode.based else None
    return write_frame([Group(mode, kind, payload)], [Segment(length, 0, base)])


def _plane(body: bytes) -> bytes:
    return b"\1" + len(body).to_bytes(4, "little") + body


BOMB = zstandard.compress(bytes(256 << 20), 3)
SILENT = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
OLD = Files([bytes(1 << 16)])


@pytest.mark.parametrize("bomb", [BOMB, SILENT])
@pytest.mark.parametrize(
    ("mode", "wrap"),
    [
        (Mode.ZSTD, False),
        (Mode.ZSTD_BASE, False),
        (Mode.PLANES, True),
        (Mode.DIFFERENCES, True),
        (Mode.SUBTRACTED, True),
        (Mode.XORED, True),
    ],
)
def test_a_bomb_is_refused_before_it_takes_memory(mode: Mode, wrap: bool, bomb: bytes) -> None:
    payload = _plane(bomb) if wrap else bomb
    frame = _one(mode, ElementType.BYTES, payload, 1 << 16)
    tracemalloc.start()
    with pytest.raises(MalformedError, match="compressed bytes"):
        decode_frame(frame, 1 << 16, OLD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_memory_stays_near_what_is_declared_and_a_lie_about_it_is_refused_first() -> None:
    target = 1 << 20
    frame = _one(Mode.RAW, ElementType.BYTES, bytes(10), 10)
    tracemalloc.start()
    with pytest.raises(MalformedError, match="does not rebuild"):
        decode_frame(frame, MAX_FRAME_BYTES, NOTHING)
    with pytest.raises(MalformedError, match="does not rebuild"):
        decode_frame(_one(Mode.RAW, ElementType.BYTES, b"", 1 << 40), 1 << 40, NOTHING)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    data = np.random.default_rng(1).normal(0, 1, target // 4).astype(np.float32).tobytes()
    good = encode_frame(memoryview(data), [Piece(target, ElementType.FLOAT32)], NOTHING)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    decode_frame(good, target, NOTHING)
    assert tracemalloc.get_traced_memory()[1] - before < 2.2 * target
    tracemalloc.stop()


def test_what_is_not_a_whole_number_of_elements_is_refused() -> None:
    with pytest.raises(MalformedError, match="within an element"):
        decode_frame(_one(Mode.SAME, ElementType.FLOAT32, b"", 6), 6, Files([bytes(8)]))


def test_a_payload_where_none_belongs_is_refused() -> None:
    with pytest.raises(MalformedError, match="has a payload"):
        decode_frame(_one(Mode.SAME, ElementType.BYTES, b"x", 6), 6, Files([bytes(8)]))
    with pytest.raises(MalformedError, match="where 6 belong"):
        decode_frame(_one(Mode.RAW, ElementType.BYTES, b"x", 6), 6, Files([bytes(8)]))


@pytest.mark.parametrize("mode", [Mode.DIFFERENCES, Mode.SUBTRACTED, Mode.XORED])
def test_planes_that_are_not_one_for_each_byte_are_refused(mode: Mode) -> None:
    plane = b"\0" + (2).to_bytes(4, "little") + b"ab"
    good = _one(mode, ElementType.INT16, plane * 2, 4)
    assert len(decode_frame(good, 4, OLD)) == 4
    for payload in (plane, plane * 3, plane * 2 + b"\0", b"\2" + plane[1:] + plane, plane[:-1]):
        with pytest.raises(MalformedError, match="plane"):
            decode_frame(_one(mode, ElementType.INT16, payload, 4), 4, OLD)
    with pytest.raises(MalformedError, match="where 3 belong"):
        decode_frame(_one(mode, ElementType.INT16, plane * 2, 6), 6, OLD)


def test_a_mode_that_no_frame_has_is_refused() -> None:
    frame = bytearray(_one(Mode.XORED, ElementType.BYTES, b"", 0))
    frame[6] = max(Mode) + 1
    with pytest.raises(MalformedError, match="mode 9"):
        decode_frame(bytes(frame), 0, OLD)


def test_a_base_that_lacks_a_range_is_the_reader_s_to_refuse() -> None:
    frame = _one(Mode.SAME, ElementType.BYTES, b"", 9)
    with pytest.raises(MalformedError, match="outside of file 0"):
        decode_frame(frame, 9, Files([bytes(8)]))
    with pytest.raises(MalformedError, match="no file 0"):
        decode_frame(frame, 9, NOTHING)


def test_more_parts_than_frames_have_are_a_limit() -> None:
    many = [Group(Mode.RAW, ElementType.BYTES, b"")] * (MAX_GROUPS + 1)
    with pytest.raises(LimitError, match="groups"):
        read_frame(write_frame(many, []), 0)
    segments = [Segment(0, 0, None)] * (MAX_SEGMENTS + 1)
    with pytest.raises(LimitError, match="segments"):
        read_frame(write_frame(many[:1], segments), 0)


def test_all_groups_and_segments_at_once_are_decoded_without_a_product_of_both() -> None:
    groups = [Group(Mode.RAW, ElementType.BYTES, b"")] * MAX_GROUPS
    segments = [Segment(0, k % MAX_GROUPS, None) for k in range(MAX_SEGMENTS)]
    assert decode_frame(write_frame(groups, segments), 0, NOTHING) == b""


def test_changes_that_end_early_stop_early() -> None:
    """A payload that runs dry tells of no change any more, instead of one for each element."""
    frame = _one(Mode.CHANGES, ElementType.BFLOAT16, bytes(3) + b"\xff" * 8, 1 << 16)
    with pytest.raises(MalformedError, match="do not decode"):
        decode_frame_into(frame, memoryview(bytearray(1 << 16)), OLD)


# --- the kernel's own border ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "error"),
    [
        ([(b"1234", 0, b"1234", 0, 5)], ValueError),
        ([(b"1234", 1, b"1234", 0, 4)], ValueError),
        ([(b"1234", -1, b"1234", 0, 1)], ValueError),
        ([(b"1234", 5, b"1234", 0, 0)], ValueError),
        ([(b"1234", 0, b"1234", 0, -1)], ValueError),
        ([(b"1234", 0, b"1234", 0, 1 << 40)], ValueError),
        ([(None, 0, b"1234", 0, 4)], ValueError),
        ([("1234", 0, b"1234", 0, 4)], TypeError),
        ([(b"1234", 0, b"1234", 0)], TypeError),
        ([[b"1234", 0, b"1234", 0, 4]], TypeError),
        (((b"1234", 0, b"1234", 0, 4),), TypeError),
    ],
)
def test_the_kernel_refuses_what_does_not_fit(segments: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        kernel.encode_changes(0, segments, 10)  # type: ignore[arg-type]
    with pytest.raises((error, BufferError)):
        kernel.decode_changes(0, segments, b"")  # type: ignore[arg-type]


def test_the_kernel_refuses_other_types_planes_and_targets() -> None:
    with pytest.raises(ValueError, match="element type"):
        kernel.encode_changes(10, [], 1)
    with pytest.raises(ValueError, match="negative"):
        kernel.encode_changes(0, [], -1)
    with pytest.raises(BufferError):
        kernel.decode_changes(0, [(b"1", 0, b"1", 0, 1)], bytes(20))
    with pytest.raises(ValueError, match="another size"):
        kernel.split_planes(0, [(None, 0, b"12", 0, 2)], [bytearray(1)])
    with pytest.raises(ValueError, match="as many buffers"):
        kernel.split_planes(1, [(None, 0, b"12", 0, 1)], [bytearray(1)])
    for way in (-1, 3):
        with pytest.raises(ValueError, match="unknown way"):
            kernel.split_planes(0, [(b"1", 0, b"1", 0, 1)], [bytearray(1)], way)
    for way in (1, 2):
        with pytest.raises(ValueError, match="no base"):
            kernel.merge_planes(0, [(None, 0, bytearray(1), 0, 1)], [b"1"], way)


def test_without_the_kernel_the_import_says_which_command_to_run() -> None:
    program = (
        "import sys; sys.modules['shardcast.codec._kernel'] = None\nimport shardcast.codec.decode"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "pip install --editable ." in result.stderr
    assert "python3-dev" in result.stderr
