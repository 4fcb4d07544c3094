"""What a frame costs when things move, and that it never costs more than the best simple way."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardcast.codec import kernel
from shardcast.codec.elements import ElementType
from shardcast.codec.encode import Piece, encode_frame
from shardcast.codec.frame import BaseRange, Mode, read_frame
from shardcast.codec.spans import OldFile, file_spans
from tests.unit.codec.made import (
    NOTHING,
    Codes,
    Files,
    cost,
    encode_file,
    moved,
    safetensors,
    tensors_of,
    weights,
)

RNG = np.random.default_rng(11)
A, B, C = (weights(RNG, 200_000, sigma) for sigma in (0.02, 0.04, 0.03))
A2, B2, C2 = (moved(RNG, codes, 0.005) for codes in (A, B, C))
CHANGED = sum(int((x != y).sum()) for x, y in ((A, A2), (B, B2), (C, C2)))
SEVERAL = {"a": ("BF16", A.tobytes()), "b": ("BF16", B.tobytes()), "c": ("BF16", C.tobytes())}
LATER = {"a": ("BF16", A2.tobytes()), "b": ("BF16", B2.tobytes()), "c": ("BF16", C2.tobytes())}
OLD, NEW = safetensors(SEVERAL), safetensors(LATER)
PLAIN = cost(NEW, [OLD])
"""What the changes cost when nothing moved."""


def test_changes_that_fall_by_chance_cost_what_their_entropy_says() -> None:
    # H(0.005) = 0.0454 bits an element, and one bit for up or down: 10.1 bits a change.
    assert PLAIN <= 10.1 / 8 * CHANGED * 1.04 + 100


def test_nothing_changed_costs_nothing_worth_mentioning() -> None:
    assert cost(OLD, [OLD]) < 40


def test_a_header_that_grew_by_8_bytes() -> None:
    assert cost(safetensors(LATER, pad=8), [OLD]) <= PLAIN + 120


def test_a_header_of_a_real_size_that_grew() -> None:
    # 3,000 names before and 3,001 after: every offset behind the new one is another number.
    def header(names: list[str]) -> bytes:
        return safetensors({name: ("BF16", A[:64].tobytes()) for name in names})

    names = [f"model.layers.{k // 10}.part.{k % 10}.weight" for k in range(3000)]
    old, new = header(names), header([*names[:1500], "model.added.weight", *names[1500:]])
    compressed = len(zstandard.compress(new[: len(new) - 3001 * 128], 12))
    assert cost(new, [old]) <= compressed + 1000


def test_tensors_in_another_order() -> None:
    later = {name: LATER[name] for name in ("c", "a", "b")}
    assert cost(safetensors(later), [OLD]) <= PLAIN + 250


def test_tensors_spread_over_files_in_another_way() -> None:
    old = [safetensors({"a": SEVERAL["a"], "b": SEVERAL["b"]}), safetensors({"c": SEVERAL["c"]})]
    first, second = safetensors({"a": LATER["a"]}), safetensors({"c": LATER["c"], "b": LATER["b"]})
    assert cost(first, old, 0) + cost(second, old, 1) <= PLAIN + 500
    assert cost(first, old, None) + cost(second, old, None) <= PLAIN + 600


def test_a_tensor_that_grew_pays_for_what_is_new() -> None:
    grown = {**LATER, "b": ("BF16", np.concatenate([B2, A[:10_000]]).tobytes())}
    assert cost(safetensors(grown), [OLD]) <= PLAIN + 0.72 * 20_000 + 300


def test_a_tensor_that_shrank_costs_no_more() -> None:
    less = {**LATER, "b": ("BF16", B2[:150_000].tobytes())}
    assert cost(safetensors(less), [OLD]) <= PLAIN + 200


@pytest.mark.parametrize(("name", "dtype"), [("renamed", "BF16"), ("b", "F16")])
def test_a_tensor_of_another_name_or_dtype_is_compressed_alone(name: str, dtype: str) -> None:
    others = {"a": LATER["a"], name: (dtype, B2.tobytes()), "c": LATER["c"]}
    assert cost(safetensors(others), [OLD]) <= PLAIN + 0.72 * B2.nbytes


def test_a_cast_to_float32_costs_what_it_holds() -> None:
    wide = (A2.astype(np.uint32) << 16).tobytes()
    later = {**LATER, "a": ("F32", wide)}
    assert cost(safetensors(later), [OLD]) <= PLAIN + 0.72 * A2.nbytes + 1000


@pytest.mark.parametrize("length", [1, 1000, len(OLD) // 2, len(OLD) + 5000])
def test_a_base_of_another_length(length: int) -> None:
    old = (OLD + bytes(5000))[:length]
    reached = [tensor for tensor in tensors_of(old) if tensor.offset + tensor.length <= length]
    if length < len(OLD):
        assert not reached  # a safetensors file that is cut is none
        assert cost(NEW, [old]) <= 0.75 * len(NEW)
    else:
        assert cost(NEW, [old]) <= PLAIN + 100


def test_frames_across_the_borders_of_elements_and_tensors() -> None:
    # 13 frames of an odd size: each has its own statistics to learn, and two cut elements.
    assert cost(NEW, [OLD], frame_bytes=100_001) <= PLAIN + 13 * 250


def test_exact_spans_cover_a_file_once() -> None:
    spans = file_spans(
        len(NEW), tensors_of(NEW), OldFile(0, len(OLD)), {t.name: t for t in tensors_of(OLD)}
    )
    at = 0
    for span in spans:
        assert span.offset == at
        at += span.length
    assert at == len(NEW)


# --- density ------------------------------------------------------------------------------------


def _leb(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


_LIST = 3 << 20
"""The most changes that a list may have (PROTOCOL section 9)."""


def _sparse(new: Codes, old: Codes) -> int:
    changes = kernel.encode_changes(
        ElementType.BFLOAT16, [(old.data, 0, new.data, 0, len(new))], len(new)
    )
    assert changes is not None
    return len(changes)


def simple_ways(new: Codes, old: Codes) -> Iterator[tuple[str, int]]:
    """The sizes of a list of changes, of dense differences, and of the bytes themselves."""
    yield "raw", new.nbytes
    yield (
        "sparse",
        sum(_sparse(new[k : k + _LIST], old[k : k + _LIST]) for k in range(0, len(new), _LIST)),
    )
    for name, dense in (
        ("xor", (new ^ old)),
        ("difference", new - old),
        ("plain", new),
    ):
        planes = dense.view(np.uint8).reshape(-1, 2).T
        for level in (1, 3):
            yield (
                f"{name} planes, zstd-{level}",
                sum(min(len(zstandard.compress(p.tobytes(), level)), p.size) for p in planes),
            )


def _steps(most: int) -> Callable[[np.random.Generator, Codes, float], Codes]:
    return lambda rng, old, density: moved(rng, old, density, most)


def _to_zero(rng: np.random.Generator, old: Codes, density: float) -> Codes:
    new = old.copy()
    new[: int(len(old) * density)] = 0
    return new


def _fresh(rng: np.random.Generator, old: Codes, density: float) -> Codes:
    return np.where(rng.random(len(old)) < density, weights(rng, len(old)), old)


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.03, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("change", [_steps(1), _steps(30), _fresh, _to_zero])
def test_never_more_than_the_best_simple_way(
    density: float, change: Callable[[np.random.Generator, Codes, float], Codes]
) -> None:
    rng = np.random.default_rng(17)
    old = weights(rng, 1_500_000)
    new = change(rng, old, density)
    best, way = min((size, name) for name, size in simple_ways(new, old))
    frame = encode_frame(
        memoryview(new.tobytes()),
        [Piece(new.nbytes, ElementType.BFLOAT16, BaseRange(0, 0))],
        Files([old.tobytes()]),
    )
    # Lists below 1/64 of the bytes are taken without a look at other ways.
    assert len(frame) <= max(best * 1.001, new.nbytes / 64 if density < 0.03 else 0) + 40, way


def test_a_cut_list_is_hardly_longer() -> None:
    rng = np.random.default_rng(18)
    old = weights(rng, 5_000_000)
    new = moved(rng, old, 1.0)
    frame = encode_frame(
        memoryview(new.tobytes()),
        [Piece(new.nbytes, ElementType.BFLOAT16, BaseRange(0, 0))],
        Files([old.tobytes()]),
    )
    assert len(read_frame(frame, new.nbytes).groups) == 2
    best = min(size for _, size in simple_ways(new, old))
    assert len(frame) <= best * 1.001


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8).tobytes()
    for kind in (ElementType.BYTES, ElementType.BFLOAT16):
        frame = encode_frame(memoryview(noise), [Piece(len(noise), kind)], NOTHING)
        assert read_frame(frame, len(noise)).groups[0].mode is Mode.RAW
        assert len(frame) <= len(noise) + 30


# --- without a base -------------------------------------------------------------------------------


def test_a_copy_without_a_base_takes_at_most_seven_tenths() -> None:
    for sigma in (0.003, 0.02, 0.2):
        data = weights(np.random.default_rng(4), 2_000_000, sigma).tobytes()
        frame = encode_frame(memoryview(data), [Piece(len(data), ElementType.BFLOAT16)], NOTHING)
        assert len(frame) <= 0.70 * len(data)


MINILM = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "minilm-steps"


def test_real_weights_without_a_base_take_at_most_seven_tenths() -> None:
    """On all-MiniLM-L6-v2 where it is at hand; else on the generated model most like it."""
    real = MINILM / "base.safetensors"
    if real.is_file():
        data = real.read_bytes()
    else:
        rng = np.random.default_rng(6)
        tensors = {
            f"layer.{k}": ("BF16", weights(rng, 100_000, 0.02 + 0.01 * k).tobytes())
            for k in range(12)
        }
        data = safetensors(tensors)
    assert sum(map(len, encode_file(data, []))) <= 0.70 * len(data)
