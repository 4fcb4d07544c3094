"""What a delta costs by optimiser, weights, learning rate and steps per publication: one table.

    python -m loadtest.regimes

Made-up runs (`training.py`), and before them the real steps of data/minilm-steps where that directory
lies beside the repository. A run's versions are compared with its first one after 1, 2, 4, 8 and 16
optimiser steps. Counted is everything that travels for a holder of the base: frames and the delta part.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from loadtest import tables
from loadtest.codec import REAL, real_steps
from loadtest.training import REGIMES, Regime, Training
from loadtest.yardstick import elements, ours

STEPS: Final = (1, 2, 4, 8, 16)
RATES: Final = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)
PARAMETERS: Final = 8_000_000
OPTIMISERS: Final = {"AdamW": "adam", "Muon": "muon"}
WEIGHTS: Final = {
    "fp32 masters, bf16 published": Regime(),
    "bf16 weights only": Regime(masters=False),
    "fp32 masters, FP8 published": Regime(dtype="F8_E4M3"),
}

LARGE_BYTES: Final = 62_000_000_000
LINK_BITS_PER_S: Final = 590_000_000


@dataclass(frozen=True)
class Cell:
    """One regime at one number of steps.

    Attributes:
        density: The share of elements that changed.
        per_change: Bytes that travel per changed element.
        ratio: The version's bytes over those.
    """

    density: float
    per_change: float
    ratio: float

    @property
    def seconds(self) -> float:
        """What the bytes take for a large version on the usual link: bytes over rate, no more."""
        return LARGE_BYTES / self.ratio * 8 / LINK_BITS_PER_S


Arrays = Sequence[npt.NDArray[Any]]


def cell(new: bytes, old: bytes, now: Arrays, before: Arrays) -> Cell:
    """Compare two versions: as files, and as arrays of elements."""
    total = sum(len(array) for array in now)
    changed = sum(int((a != b).sum()) for a, b in zip(now, before, strict=True))
    size = ours(new, old)
    return Cell(changed / total, size / max(changed, 1), len(new) / size)


def real_cells() -> dict[int, Cell]:
    """Return the cells of the real run."""
    versions = list(itertools.islice(real_steps(max(STEPS)), max(STEPS) + 1))
    first = versions[0]
    return {
        count: cell(versions[count], first, [elements(versions[count])], [elements(first)])
        for count in STEPS
    }


def made_cells(optimiser: str, parameters: int) -> Iterator[tuple[str, float, dict[int, Cell]]]:
    """Yield weights, learning rate and cells of runs that share an optimiser's noise."""
    leader = Training(parameters * 2, REGIMES[optimiser])
    runs = {
        (weights, rate): leader.beside(
            replace(leader.regime, learning_rate=rate, masters=kind.masters, dtype=kind.dtype)
        )
        for weights, kind in WEIGHTS.items()
        for rate in RATES
    }
    begun = {key: (run.safetensors(), _arrays(run)) for key, run in runs.items()}
    cells: dict[tuple[str, float], dict[int, Cell]] = {key: {} for key in runs}
    taken = 0
    for count in STEPS:
        leader.step(count - taken)
        taken = count
        for key, run in runs.items():
            old, before = begun[key]
            cells[key][count] = cell(run.safetensors(), old, _arrays(run), before)
    for (weights, rate), found in cells.items():
        yield weights, rate, found


def _arrays(run: Training) -> Arrays:
    return [codes for *_, codes in run.arrays()]


def _row(name: str, found: dict[int, Cell]) -> list[str]:
    return [name, *(_text(found[count]) for count in STEPS)]


def _text(one: Cell) -> str:
    density = f"{one.density:.2%}" if one.density >= 0.0005 else f"{one.density:.3%}"
    ratio = f"{one.ratio:.0f}" if one.ratio >= 100 else f"{one.ratio:.1f}"
    return f"{density} x {one.per_change:.2f} B = 1/{ratio}, {one.seconds:.3g} s"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--out", type=Path, default=tables.RESULTS, help="where the table goes")
    options = parser.parse_args()
    start = time.monotonic()
    header = ["learning rate", *(f"{n} step{'s' if n > 1 else ''} a version" for n in STEPS)]
    blocks: list[str] = []
    if (REAL / "steps.npz").is_file():
        blocks += [
            "## Real: all-MiniLM-L6-v2, AdamW, fp32 masters, bf16 published",
            tables.table(header, [_row("1e-6", real_cells())]),
        ]
    for optimiser, regime in OPTIMISERS.items():
        groups: dict[str, list[list[str]]] = {}
        for weights, rate, found in made_cells(regime, options.parameters):
            groups.setdefault(weights, []).append(_row(f"{rate:.0e}".replace("e-0", "e-"), found))
        for weights, rows in groups.items():
            blocks += [f"## Made up: {optimiser}, {weights}", tables.table(header, rows)]
    whole = LARGE_BYTES * 8 / LINK_BITS_PER_S
    path = tables.write(
        "regimes",
        "What a delta costs, by regime",
        f"`python -m loadtest.regimes`: made-up runs of {options.parameters / 1e6:g} M parameters. Each cell: "
        "elements that changed since the base x bytes per changed element (all that travels: frames, delta part) "
        "= share of the full version, and **predicted** seconds for a version of 62 GB at 590 Mb/s: bytes over "
        f"rate, nothing else (a full copy: {whole:.0f} s; for FP8, too, a version of 62 GB, which is twice the "
        "parameters).",
        "The runs (`loadtest/training.py`): normal weights, per-tensor scales as in decoders; gradients that are "
        "noise, optimisers in their steady state, no warm-up and no drift, so that sums over steps grow by "
        "momentum and chance alone. Muon: orthogonalised momentum (Newton-Schulz) for matrices, scaled so that "
        "its updates are as large as Adam's at the same learning rate; *unscaled* Muon moves weights many times "
        "as far. Embeddings change in the rows of tokens that were seen (4 % a step), norms hardly. FP8: e4m3 "
        "codes and a scale for each 128 x 128 block, made again from the masters for each version.",
        *blocks,
        f"Seen {tables.seen()}; it took {time.monotonic() - start:.0f} s. Bytes decide here, no clock.",
        directory=options.out,
    )
    print(path)


if __name__ == "__main__":
    main()
