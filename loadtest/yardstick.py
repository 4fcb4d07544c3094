"""What a step costs, beside what published codecs take for the same step and what entropy allows.

    python -m loadtest.yardstick

On the 33 real steps of data/minilm-steps, where that directory lies beside the repository, else on
made-up ones (`training.py`); the table says which. All figures are bytes per changed element. Ours is
everything that travels: frames and the delta part. The published ways are written here after their
descriptions, each at its best setting for this data, without headers; the floors are entropies.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from loadtest import tables
from loadtest.codec import (
    MADE_BYTES,
    REAL,
    REAL_STEPS,
    document_bytes,
    encode,
    jobs,
    made_steps,
    real_steps,
)
from shardcast.codec.spans import read_tensors

Codes = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int64]

_REGION: Final = {"16 MiB": 8 << 20, "2 MiB": 1 << 20, "512 KiB": 1 << 18}
"""How many elements share a table, of the regions for which there is a floor."""


@dataclass(frozen=True)
class Change:
    """One step: the elements before, where they changed, and into what."""

    old: Codes
    new: Codes
    index: Integers
    difference: Integers

    @property
    def density(self) -> float:
        """Which share of the elements changed."""
        return len(self.index) / len(self.old)


def elements(version: bytes) -> Codes:
    """Return the bf16 elements of a safetensors file, tensor by tensor."""
    start = 8 + int.from_bytes(version[:8], "little")
    found = read_tensors(version[:start], 0, len(version))
    parts = [
        np.frombuffer(version, "<u2", count=tensor.length // 2, offset=tensor.offset)
        for tensor in found
        if tensor.dtype == "BF16"
    ]
    return np.concatenate(parts)


def ordered(codes: Codes) -> Integers:
    """Return bf16 codes as integers in the order of their values."""
    signed = codes.astype(np.int64)
    return np.where(signed < 0x8000, signed, 0x8000 - signed)


def change(old: Codes, new: Codes) -> Change:
    """Compare two versions of the same tensors."""
    index = np.flatnonzero(old != new)
    return Change(old, new, index, ordered(new[index]) - ordered(old[index]))


# --- what others do -------------------------------------------------------------------------


def _packed(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))


def _gaps(step: Change) -> bytes:
    """Distances between changes in 16 bits; larger ones would need an escape, not counted here."""
    gaps = np.diff(step.index, prepend=-1) - 1
    return bytes(np.minimum(gaps, 0xFFFF).astype("<u2"))


def _mask(step: Change) -> bytes:
    return bytes((step.old ^ step.new)[step.index])


PUBLISHED: Final[dict[str, Callable[[Change], int]]] = {
    "XOR of all, zstd-1 (slime, SkyRL)": lambda step: _packed((step.old ^ step.new).tobytes()),
    "gaps + new values, zstd-1 (PULSE)": lambda step: _packed(
        _gaps(step) + step.new[step.index].tobytes()
    ),
    "gaps + XOR, zstd-1 each (NeMo-DCR)": lambda step: _packed(_gaps(step)) + _packed(_mask(step)),
}


# --- what entropy allows --------------------------------------------------------------------


def _bits(counts: npt.NDArray[np.int64]) -> float:
    """Return the bits that symbols with these counts take, all of them together."""
    held = counts[counts > 0]
    return float((held * np.log2(held.sum() / held)).sum()) if len(held) else 0.0


def _split_bits(total: npt.NDArray[np.int64], changed: npt.NDArray[np.int64]) -> float:
    """Return the bits that say which elements of each class changed."""
    pairs = zip(total.tolist(), changed.tolist(), strict=True)
    return sum(_bits(np.array([hit, count - hit])) for count, hit in pairs if hit)


def _regions(step: Change, size: int) -> Iterator[tuple[Codes, Integers, Integers]]:
    """Yield the old elements of each region, where they changed, and by how much."""
    for at in range(0, len(step.old), size):
        first, last = np.searchsorted(step.index, [at, at + size])
        yield step.old[at : at + size], step.index[first:last] - at, step.difference[first:last]


def floor_iid(step: Change) -> float:
    """Positions without any context, and one table of differences."""
    count = len(step.index)
    values = np.unique(step.difference, return_counts=True)[1]
    return (_bits(np.array([count, len(step.old) - count])) + _bits(values)) / 8


def floor_by_exponent(step: Change, size: int, *, values_too: bool) -> float:
    """Positions given the exponent, tables per region; the differences given it, too, or not."""
    bits = 0.0
    for old, index, difference in _regions(step, size):
        exponent = (old >> 7) & 0xFF
        total = np.bincount(exponent, minlength=256)
        bits += _split_bits(total, np.bincount(exponent[index], minlength=256))
        classes = exponent[index] if values_too else np.zeros_like(index)
        symbols = difference * 256 + classes
        for one in np.unique(classes):
            bits += _bits(np.unique(symbols[classes == one], return_counts=True)[1])
    return bits / 8


FLOORS: Final[dict[str, Callable[[Change], float]]] = {
    "no context": floor_iid,
    "exponent, one table": lambda step: floor_by_exponent(step, len(step.old), values_too=False),
    **{
        f"exponent and value, {name}": lambda step, size=size: floor_by_exponent(  # type: ignore[misc]
            step, size, values_too=True
        )
        for name, size in _REGION.items()
    },
}


# --- the table ------------------------------------------------------------------------------


def ours(new: bytes, old: bytes) -> int:
    """Return what travels for a step: its frames, and the delta part that lists them."""
    frames = [encode(job) for job in jobs(new, old)]
    return sum(map(len, frames)) + document_bytes(frames)


def measure(versions: Iterator[bytes]) -> Iterator[tuple[float, float, float, list[float]]]:
    """Yield for each step: density, elements changed, ratio to the version, costs by column."""
    for old, new in itertools.pairwise(versions):
        step = change(elements(old), elements(new))
        count = len(step.index)
        size = ours(new, old)
        costs: list[float] = [size, *(act(step) for act in PUBLISHED.values())]
        costs += [act(step) for act in FLOORS.values()]
        yield step.density, count, len(new) / size, [cost / count for cost in costs]


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=REAL_STEPS)
    parser.add_argument("--out", type=Path, default=tables.RESULTS, help="where the table goes")
    options = parser.parse_args()
    real = (REAL / "steps.npz").is_file()
    count = min(options.steps, REAL_STEPS)
    found = list(measure(real_steps(count) if real else made_steps(count, MADE_BYTES)))
    header = ["step", "changed", "ratio", "shardcast", *PUBLISHED, *FLOORS]
    rows = [
        [str(n), f"{density:.3%}", f"1/{ratio:.0f}", *(f"{cost:.3f}" for cost in costs)]
        for n, (density, _, ratio, costs) in enumerate(found, 1)
    ]
    # The mean of a column weighs every changed element alike.
    weights = np.array([changed for _, changed, _, _ in found])
    mean = np.average([costs for *_, costs in found], axis=0, weights=weights)
    density = float(np.mean([density for density, *_ in found]))
    whole = f"1/{2 / (density * mean[0]):.0f}"
    rows.append(
        ["**mean**", f"{density:.3%}", whole, f"**{mean[0]:.3f}**", *(f"{c:.3f}" for c in mean[1:])]
    )
    what = (
        f"{count} consecutive optimiser steps of all-MiniLM-L6-v2 (22.7 M parameters): fine-tuning, AdamW, "
        "learning rate 1e-6, fp32 masters, published as bf16, one step per version"
        if real
        else f"{count} made-up steps (loadtest/training.py)"
    )
    path = tables.write(
        "bytes",
        "Bytes per changed element, step by step",
        f"`python -m loadtest.yardstick`: {what}. Bytes decide here, no clock: a busy machine gives "
        "the same table.",
        "*shardcast* is everything that travels for a holder of the version before: frames in blobs, and the "
        "delta part that lists them (not the head, a layout and parts, which a full version has, too). The "
        "published ways count their payload only, without headers. Floors are entropies without the cost of "
        "any table: positions and ordered-integer differences with no context; positions given the exponent of "
        "the old element, one table for the model; both given it, a table for each region of so many bytes.",
        tables.table(header, rows),
        f"Seen {tables.seen()}.",
        directory=options.out,
    )
    print(path)
    print(rows[-1])


if __name__ == "__main__":
    main()
