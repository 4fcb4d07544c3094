"""At every density, whatever the elements are, a frame costs no more than the best simple way."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from shardcast.codec import kernel
from shardcast.codec.decode import decode_frame
from shardcast.codec.elements import ElementType
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import BaseRange
from tests.unit.codec.made import Files

Codes = npt.NDArray[np.unsignedinteger]

BYTES = 1 << 20
UNSIGNED: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


def _floats(dtype: type) -> Callable[[np.random.Generator], bytes]:
    count = BYTES // np.dtype(dtype).itemsize
    return lambda rng: rng.normal(0, 0.02, count).astype(dtype).tobytes()


def _eight_bits(rng: np.random.Generator, exponent: int, mantissa: int) -> bytes:
    """FP8 codes: the sign by chance, exponents in the middle, so that steps end at neither end."""
    size = np.abs(rng.normal(0, 0.3, BYTES))
    scale = 2.0 ** (2 ** (exponent - 1) + 3)
    lowest, highest = 10 / 2**mantissa, 2**exponent - 1 - 10 / 2**mantissa
    level = np.clip(np.log2(np.maximum(size * scale, 1e-9)), lowest, highest)
    signs = rng.integers(0, 2, BYTES, np.uint8) << 7
    return bytes((level * 2**mantissa).astype(np.uint8) | signs)


MADE: dict[ElementType, Callable[[np.random.Generator], bytes]] = {
    ElementType.FLOAT16: _floats(np.float16),
    ElementType.FLOAT32: _floats(np.float32),
    ElementType.FLOAT64: _floats(np.float64),
    ElementType.FLOAT8_E4M3: lambda rng: _eight_bits(rng, 4, 3),
    ElementType.FLOAT8_E5M2: lambda rng: _eight_bits(rng, 5, 2),
    ElementType.INT16: lambda rng: rng.integers(-3000, 3000, BYTES // 2, np.int16).tobytes(),
    ElementType.INT32: lambda rng: rng.integers(0, 50_000, BYTES // 4, np.int32).tobytes(),
    # Two codes of 4 bits a byte, as packed quantised weights: near the middle.
    ElementType.BYTES: lambda rng: bytes(
        np.clip(rng.normal(8, 2, BYTES), 0, 15).astype(np.uint8)
        | np.clip(rng.normal(8, 2, BYTES), 0, 15).astype(np.uint8) << 4
    ),
}


def _planes(codes: np.ndarray, width: int) -> Iterator[int]:
    planes = codes.view(np.uint8).reshape(-1, width).T
    for level in (1, 3):
        yield sum(min(len(zstandard.compress(p.tobytes(), level)), p.size) for p in planes)


def simple_ways(new: bytes, old: bytes, kind: ElementType) -> Iterator[int]:
    """The sizes of a list of changes, of dense differences, of the elements and of the bytes."""
    count = len(new) // kind.width
    changes = kernel.encode_changes(kind, [(old, 0, new, 0, count)], count)
    assert changes is not None
    yield from (len(new), len(changes))
    a, b = (np.frombuffer(data, UNSIGNED[kind.width]) for data in (new, old))
    for dense in (a ^ b, a - b, a):
        yield from _planes(dense, kind.width)


def _check(new: bytes, old: bytes, kind: ElementType) -> None:
    """A frame is longer than the best simple way by its header and the planes' lengths at most."""
    frame = encode_frame(memoryview(new), [Piece(len(new), kind, BaseRange(0, 0))], Files([old]))
    assert decode_frame(frame, len(new), Files([old])) == new
    assert len(frame) <= min(simple_ways(new, old, kind)) * 1.001 + 24 + 5 * kind.width


def _steps(rng: np.random.Generator, codes: Codes, most: int) -> Codes:
    """The codes moved by 1 to ``most``, up or down: past zero and past the largest they wrap."""
    moves = rng.integers(1, most + 1, codes.size).astype(codes.dtype)
    return codes + np.where(rng.random(codes.size) < 0.5, moves, -moves)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("density", [0.03, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("step", [1, 9])
def test_never_more_than_the_best_simple_way(kind: ElementType, density: float, step: int) -> None:
    rng = np.random.default_rng(5)
    old = MADE[kind](rng)
    codes = np.frombuffer(old, UNSIGNED[kind.width])
    where = rng.random(codes.size) < density
    _check(np.where(where, _steps(rng, codes, step), codes).tobytes(), old, kind)


# --- across zero, past the largest ----------------------------------------------------------------


def _values(rng: np.random.Generator, codes: Codes) -> Codes:
    """Sign and magnitude moved by up to three values: of those at zero the sign changes."""
    top = codes.dtype.type(1 << (8 * codes.itemsize - 1))
    order = np.where(codes & top, ~codes, codes ^ top)
    moved = _steps(rng, order, 3)
    return np.where(moved & top, moved ^ top, ~moved)


CHANGES: dict[str, Callable[[np.random.Generator, Codes], Codes]] = {
    "by one code": lambda rng, codes: _steps(rng, codes, 1),
    "by some codes": lambda rng, codes: _steps(rng, codes, 9),
    "all upwards": lambda rng, codes: codes + codes.dtype.type(3),
    "by some values": _values,
    "a bit": lambda rng, codes: (
        codes
        ^ (
            codes.dtype.type(1)
            << rng.integers(0, 8 * codes.itemsize, codes.size).astype(codes.dtype)
        )
    ),
    "the sign": lambda rng, codes: codes ^ codes.dtype.type(1 << (8 * codes.itemsize - 1)),
}


def _anywhere(rng: np.random.Generator, count: int, width: int) -> Codes:
    return np.frombuffer(rng.bytes(count * width), UNSIGNED[width])


def _at_the_ends(rng: np.random.Generator, count: int, width: int) -> Codes:
    """Both zeros, the largest of either sign, and what lies within three codes of them."""
    half = 1 << (8 * width - 1)
    middles = np.array([0, half], UNSIGNED[width])[rng.integers(0, 2, count)]
    return middles + rng.integers(-3, 4, count).astype(UNSIGNED[width])


@pytest.mark.parametrize("kind", ElementType)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made", [_anywhere, _at_the_ends])
def test_nor_where_changes_cross_zero_and_wrap(
    kind: ElementType, change: str, made: Callable[[np.random.Generator, int, int], Codes]
) -> None:
    rng = np.random.default_rng(6)
    old = made(rng, BYTES // 2 // kind.width, kind.width)
    moved = CHANGES[change](rng, old)
    for density in (0.03, 0.1, 0.5, 1.0):
        new = np.where(rng.random(old.size) < density, moved, old)
        _check(new.tobytes(), old.tobytes(), kind)
