"""Frames read by another implementation, written from the specification; and pinned ones."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.codec.decode import decode_frame
from shardcast.codec.elements import ElementType
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import BaseRange, Mode, read_frame
from tests.unit.codec.made import Files, encode_file, moved, safetensors, weights
from tests.vectors import scf_reference as reference


@pytest.mark.parametrize("kind", ElementType)
@pytest.mark.parametrize("density", [0.003, 0.2, 0.9])
def test_changes_mean_what_the_specification_says(kind: ElementType, density: float) -> None:
    rng = np.random.default_rng(13)
    count = 7000
    old = rng.normal(0, 0.02, count * kind.width // 4 + 2).astype(np.float32).tobytes()
    old = old[: count * kind.width]
    changed = np.frombuffer(old, np.uint8).copy().reshape(count, kind.width)
    where = rng.random(count) < density
    changed[where, 0] += rng.integers(1, 9, int(where.sum()), np.uint8)
    changed[rng.random(count) < density / 10] ^= 0x80  # other signs, far away
    new = changed.tobytes()
    # In three segments, the base's in another order.
    third = count // 3 * kind.width
    pieces = [
        Piece(third, kind, BaseRange(0, 0)),
        Piece(third, kind, BaseRange(0, third)),
        Piece(len(new) - 2 * third, kind, BaseRange(1, 5)),
    ]
    base = Files([old[: 2 * third], b"12345" + old[2 * third :]])
    frame = encode_frame(memoryview(new), pieces, base)
    assert reference.decode(frame, lambda *at: bytes(base.range(*at))) == new


@settings(max_examples=60)
@given(data=st.data())
def test_frames_of_any_bytes_mean_what_the_specification_says(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(ElementType))
    old = data.draw(st.binary(max_size=400))
    old = old[: len(old) // kind.width * kind.width]
    new = bytearray(old)
    for at in data.draw(st.lists(st.integers(0, 400), max_size=8)):
        if at < len(new):
            new[at] = data.draw(st.integers(0, 255))
    text = data.draw(st.booleans()) and kind is ElementType.BYTES
    base = BaseRange(0, 0) if data.draw(st.booleans()) else None
    frame = encode_frame(memoryview(new), [Piece(len(new), kind, base, text)], Files([old]))
    assert reference.decode(frame, lambda *at: bytes(Files([old]).range(*at))) == new


def test_every_mode_is_written_and_read() -> None:
    rng = np.random.default_rng(21)
    codes, noise = weights(rng, 40_000), rng.bytes(3000)
    small = rng.integers(-3, 4, 40_000, np.int8).view(np.uint8)
    flipped = small ^ (1 << rng.integers(0, 8, 40_000)).astype(np.uint8)
    before = {
        "few": ("BF16", codes.tobytes()),
        "same": ("F16", noise),
        "half": ("I16", codes.tobytes()),
        "gone": ("I32", noise),
        "across zero": ("F8_E4M3", small.tobytes()),
        "flags": ("U8", small.tobytes()),
    }
    after = {
        "few": ("BF16", moved(rng, codes, 0.01).tobytes()),
        "same": ("F16", noise),
        "half": ("I16", (codes + np.arange(40_000, dtype=np.uint16) % 77).tobytes()),
        "noise": ("I32", rng.bytes(3000)),
        "across zero": ("F8_E4M3", (small + rng.integers(0, 2, 40_000, np.uint8)).tobytes()),
        "flags": ("U8", flipped.tobytes()),
        "new": ("F8_E4M3", (weights(rng, 40_000) >> 8).astype(np.uint8).tobytes()),
    }
    old, new = safetensors(before), safetensors(after)
    (frame,) = encode_file(new, [old])
    assert reference.decode(frame, lambda *at: bytes(Files([old]).range(*at))) == new
    modes = {group.mode for group in read_frame(frame, len(new)).groups}
    text = b'{"vocabulary": "words that are no numbers"} ' * 40
    (frame,) = encode_file(text, [])
    assert reference.decode(frame, lambda *at: b"") == text
    modes |= {group.mode for group in read_frame(frame, len(text)).groups}
    assert modes == set(Mode)


# --- pinned frames --------------------------------------------------------------------------------

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "frames" / "pinned.json"
PINNED = {vector["name"]: vector for vector in json.loads(VECTORS.read_bytes())}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_frames_stay_readable(name: str) -> None:
    vector = PINNED[name]
    files = Files([base64.b64decode(file) for file in vector["base"]])
    frame, new = base64.b64decode(vector["frame"]), base64.b64decode(vector["target"])
    assert bytes(decode_frame(frame, len(new), files)) == new
    assert reference.decode(frame, lambda *at: bytes(files.range(*at))) == new


@pytest.mark.parametrize("name", [name for name in PINNED if name.startswith("changes-")])
def test_changes_are_coded_alike_on_every_machine(name: str) -> None:
    """No zstd in these: the bytes depend on nothing but our kernel, which has no floats."""
    vector = PINNED[name]
    files = Files([base64.b64decode(file) for file in vector["base"]])
    new = base64.b64decode(vector["target"])
    pieces = [Piece(len(new), ElementType(vector["type"]), BaseRange(0, 0))]
    assert encode_frame(memoryview(new), pieces, files) == base64.b64decode(vector["frame"])
