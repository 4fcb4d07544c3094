"""Just enough of the safetensors format to write checkpoints and to read their headers.

Format: 8 bytes little-endian length of a JSON header, the header padded with spaces to a multiple
of 8, then the tensors' bytes without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardcast.errors import MalformedError

BF16: Final = "BF16"
BF16_BYTES: Final = 2
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the reference implementation."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's name, element type and shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str = BF16

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes lie in its file: ``start`` up to, not including, ``stop``."""

    name: str
    dtype: str
    start: int
    stop: int


def encode_header(tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes before the data of a file that holds these bf16 tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.elements * BF16_BYTES
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_spans(path: Path) -> list[Span]:
    """Return where the tensors of a file lie, in the order of their bytes.

    Raises:
        MalformedError: If it is not a safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        total = path.stat().st_size
        if not 2 <= length <= min(MAX_HEADER_BYTES, total - 8):
            raise MalformedError(f"{path.name} has no safetensors header", source=str(path))
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        spans = [
            Span(name, entry["dtype"], 8 + length + begin, 8 + length + end)
            for name, entry in entries.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"{path.name}: bad safetensors header", source=str(path)) from error
    if any(not 8 + length <= span.start <= span.stop <= total for span in spans):
        raise MalformedError(f"{path.name}: a tensor lies outside the file", source=str(path))
    return sorted(spans, key=lambda span: span.start)
