"""Element types: how the bytes of a tensor are numbers."""

from __future__ import annotations

import enum
from typing import Final


class ElementType(enum.IntEnum):
    """What the kernel knows; part of the frame format: numbers never change their meaning."""

    BYTES = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    FLOAT8_E4M3 = 5
    FLOAT8_E5M2 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return _WIDTHS[self]


_WIDTHS: Final = {
    ElementType.BYTES: 1,
    ElementType.BFLOAT16: 2,
    ElementType.FLOAT16: 2,
    ElementType.FLOAT32: 4,
    ElementType.FLOAT64: 8,
    ElementType.FLOAT8_E4M3: 1,
    ElementType.FLOAT8_E5M2: 1,
    ElementType.INT16: 2,
    ElementType.INT32: 4,
    ElementType.INT64: 8,
}

SAFETENSORS: Final = {
    "BF16": ElementType.BFLOAT16,
    "F16": ElementType.FLOAT16,
    "F32": ElementType.FLOAT32,
    "F64": ElementType.FLOAT64,
    "F8_E4M3": ElementType.FLOAT8_E4M3,
    "F8_E5M2": ElementType.FLOAT8_E5M2,
    "I16": ElementType.INT16,
    "U16": ElementType.INT16,
    "I32": ElementType.INT32,
    "U32": ElementType.INT32,
    "I64": ElementType.INT64,
    "U64": ElementType.INT64,
}
"""By the dtype names of safetensors; any other (I8, U8, BOOL, packed fours, scales) is bytes."""
