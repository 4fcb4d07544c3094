"""Made-up checkpoints, and both directions of the codec on whole files."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardcast.codec.decode import decode_frame, decode_frame_into
from shardcast.codec.encode import encode_frame
from shardcast.codec.frame import MAX_FRAME_BYTES
from shardcast.codec.spans import (
    OldFile,
    Tensor,
    file_spans,
    header_bytes,
    pieces_between,
    read_tensors,
)
from shardcast.errors import MalformedError

Codes = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Files:
    """A base in memory: files by their number."""

    files: Sequence[bytes]

    def range(self, file: int, offset: int, length: int) -> memoryview:
        if not 0 <= file < len(self.files):
            raise MalformedError(f"no file {file}")
        if offset < 0 or length < 0 or offset + length > len(self.files[file]):
            raise MalformedError(f"{length} bytes at {offset} lie outside of file {file}")
        return memoryview(self.files[file])[offset : offset + length]


NOTHING = Files([])


def bf16(values: npt.NDArray[np.float32]) -> Codes:
    """Rounded to nearest even, as every framework casts."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def weights(rng: np.random.Generator, count: int, sigma: float = 0.02) -> Codes:
    """Weights as models have them, in bfloat16."""
    return bf16(rng.normal(0, sigma, count).astype(np.float32))


def moved(rng: np.random.Generator, old: Codes, density: float, most: int = 1) -> Codes:
    """Move that share of the elements by 1 to ``most`` codes up or down."""
    new = old.copy()
    where = rng.random(len(old)) < density
    steps = rng.integers(1, most + 1, len(old)) * rng.choice([-1, 1], len(old))
    # Away from zero or towards it is up or down in magnitude; the exponents stay far from the ends.
    new[where] = (old[where].astype(np.int64) + steps[where]).astype(np.uint16)
    return new


def safetensors(tensors: Mapping[str, tuple[str, bytes]], pad: int = 0) -> bytes:
    """A file of one-dimensional tensors; ``pad`` spaces more in the header."""
    widths = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2}
    entries, at = {}, 0
    for name, (dtype, data) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": [len(data) // widths.get(dtype, 1)],
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8 + pad)
    return struct.pack("<Q", len(header)) + header + b"".join(data for _, data in tensors.values())


def tensors_of(data: bytes, file: int = 0) -> list[Tensor]:
    size = header_bytes(data[:8])
    return [] if size is None else read_tensors(data[:size], file, len(data))


def encode_file(
    new: bytes,
    old: Sequence[bytes],
    same: int | None = 0,
    frame_bytes: int = MAX_FRAME_BYTES,
) -> list[bytes]:
    """Frames of a file of the new version; file ``same`` of the base has its path."""
    named = {t.name: t for k, data in enumerate(old) for t in tensors_of(data, k)}
    path = None if same is None or not old else OldFile(same, len(old[same]))
    spans = file_spans(len(new), tensors_of(new), path, named)
    return [
        encode_frame(
            memoryview(new)[at : at + frame_bytes],
            list(pieces_between(spans, at, min(at + frame_bytes, len(new)))),
            Files(old),
        )
        for at in range(0, len(new), frame_bytes)
    ]


def decode_file(
    frames: Sequence[bytes], size: int, old: Sequence[bytes], frame_bytes: int = MAX_FRAME_BYTES
) -> bytes:
    """The file that frames rebuild, by both ways to ask for it."""
    parts = []
    for index, frame in enumerate(frames):
        length = min(frame_bytes, size - index * frame_bytes)
        part = bytes(decode_frame(frame, length, Files(old)))
        again = bytearray(b"\xa5" * length)
        decode_frame_into(frame, memoryview(again), Files(old))
        assert bytes(again) == part
        parts.append(part)
    return b"".join(parts)


def cost(
    new: bytes,
    old: Sequence[bytes],
    same: int | None = 0,
    frame_bytes: int = MAX_FRAME_BYTES,
) -> int:
    """Bytes of the frames of a file, which must rebuild it."""
    frames = encode_file(new, old, same, frame_bytes)
    assert decode_file(frames, len(new), old, frame_bytes) == new
    return sum(map(len, frames))
