"""Small bf16 models as safetensors files, and training steps that change a few of their elements."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

U16 = npt.NDArray[np.uint16]
Model = Mapping[str, U16]

REAL_STEPS: Final = Path(__file__).resolve().parents[2] / "shared" / "tools" / "steps.py"
"""Writes consecutive steps of a real fine-tuning run; beside the repository, if it is there."""


def make_model(seed: int = 0, elements: int = 400_000, tensors: int = 3) -> dict[str, U16]:
    """Weights as at initialisation: normal with sigma 0.02, cut off to bf16."""
    random = np.random.default_rng(seed)
    return {
        f"layer.{n}": (random.normal(0, 0.02, elements).astype(np.float32).view(np.uint32) >> 16)
        .astype(np.uint16)
        for n in range(tensors)
    }  # fmt: skip


def step(model: Model, seed: int, density: float = 0.004) -> dict[str, U16]:
    """The model after a step: so many of its elements went to a neighbouring value."""
    random = np.random.default_rng(seed)
    new = {}
    for name, old in model.items():
        changed = old.copy()
        where = random.random(old.size) < density
        changed[where] += random.choice(np.array([1, 0xFFFF], np.uint16), int(where.sum()))
        new[name] = changed
    return new


def changed_elements(old: Model, new: Model) -> int:
    """How many elements differ."""
    return sum(int((old[name] != new[name]).sum()) for name in old)


def write_model(path: Path, model: Model, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; more metadata makes its header longer, so that all tensors move."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name, values in model.items():
        entries[name] = {
            "dtype": "BF16",
            "shape": [values.size],
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in model.values())
    )


def real_steps(out: Path, first: int, last: int) -> list[Path]:
    """Write real checkpoints; none where the data is not beside the repository."""
    if not REAL_STEPS.exists():
        return []
    subprocess.run(
        [sys.executable, REAL_STEPS, out, str(first), str(last)], check=True, timeout=120
    )
    return sorted(out.iterdir())
