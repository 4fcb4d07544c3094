"""How a checkpoint's tensors are described, and in which order they are loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NUMBERS: Final = re.compile(r"(\d+)")

DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}
"""By safetensors' name: torch's name, bytes of an element."""
NAMES: Final = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
"""By torch's name: safetensors'."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor as its header describes it; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def layer_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that keeps what belongs together together, layer 2 before layer 10."""
    return tuple(
        (0, int(part)) if part.isdigit() else (1, part) for part in _NUMBERS.split(name) if part
    )
