"""Checkpoints of a training run that never was, of any size: weights, and how steps change them.

    python -m loadtest.training OUT --bytes 1000000000 --versions 3 [--regime adam]

What a delta costs depends on which weights change and by how much, so the noise is a trainer's:
weights of a normal distribution, a scale for each tensor (and half as many of each smaller exponent, as
in any model); a step is what AdamW or Muon make of gradients that are noise, in their steady state: about
the same size for every weight, correlated from step to step by the momentum. Muon's momentum is
orthogonalised for each matrix (Newton-Schulz, the quintic of Keller Jordan's Muon), and scaled to the size
of Adam's updates; embeddings and norms are AdamW's in both. Published is the cast of fp32 masters, or bf16 weights that lose an update that rounds away, or FP8 codes
quantised again from the masters. As in real fine-tuning embeddings change only in the rows of tokens
that were seen, and norms hardly at all. At learning rate 1e-6 about 0.44 % of the elements change, as
in the steps of all-MiniLM-L6-v2 that the codec was measured on.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_CHUNK: Final = 1 << 20
_BLOCK: Final = 128
"""FP8 codes share a scale in squares of so many rows and columns, as DeepSeek-V3 stores them."""

_SEEN_ROWS: Final = 0.04
"""Of the tokens of a large vocabulary, the share that one step's texts hold."""


@dataclass(frozen=True)
class Regime:
    """How a trainer changes and publishes its weights.

    Attributes:
        learning_rate: Of the optimiser.
        momentum: How much of an update the next one repeats.
        size: Root mean square of an update, in learning rates: of Adam with beta1 0.9 in noise
            sqrt((1 - 0.9) / (1 + 0.9)); of Muon 0.2, where its updates are matched to Adam's.
        orthogonal: Whether matrices are updated as Muon does.
        masters: Whether fp32 masters keep what rounds away.
        dtype: What is published: "BF16" or "F8_E4M3".
    """

    learning_rate: float = 1e-6
    momentum: float = 0.9
    size: float = 0.229
    orthogonal: bool = False
    masters: bool = True
    dtype: str = "BF16"


_ADAM: Final = Regime()
_MUON: Final = Regime(momentum=0.95, size=0.2, orthogonal=True)
REGIMES: Final = {
    "adam": _ADAM,
    "adam-bf16": replace(_ADAM, masters=False),
    "adam-fp8": replace(_ADAM, dtype="F8_E4M3"),
    "muon": _MUON,
    "muon-bf16": replace(_MUON, masters=False),
    "muon-fp8": replace(_MUON, dtype="F8_E4M3"),
}


@dataclass
class Tensor:
    """One parameter: its fp32 masters, the optimiser's momentum, and how it is trained."""

    name: str
    shape: tuple[int, ...]
    masters: Floats
    momentum: Floats
    regime: Regime
    rows_seen: float = 1.0
    seed: int = 0
    steps: int = 0
    beside: list[Tensor] = field(default_factory=list)
    published: dict[str, tuple[str, tuple[int, ...], npt.NDArray[Any]]] = field(
        default_factory=dict
    )


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest even, as frameworks cast."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(codes: npt.NDArray[np.uint16]) -> Floats:
    """Return the values of bf16 codes."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def to_e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """Round to nearest even to FP8 with 4 bits of exponent and 3 of mantissa (OCP, finite), saturating."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    normal = np.minimum(rounded.astype(np.int64) - (120 << 3), 0x7E)
    small = np.rint(np.abs(values) * 512).astype(np.int64)  # subnormals: multiples of 2^-9
    codes = np.where(np.abs(values) < 2.0**-6, small, normal)
    signed: npt.NDArray[np.uint8] = (codes | ((bits >> 24) & 0x80)).astype(np.uint8)
    return signed


def orthogonalised(matrix: Floats) -> Floats:
    """Return about the nearest matrix with orthonormal rows or columns, as Muon makes it.

    Five iterations of the quintic X -> aX + b(XX')X + c(XX')^2 X bring all singular values to about 1
    (0.7 to 1.2), coefficients as published with Muon (Keller Jordan, 2024).
    """
    a, b, c = np.float32(3.4445), np.float32(-4.7750), np.float32(2.0315)
    rows, columns = matrix.shape
    x: Floats = (matrix.T if rows > columns else matrix) / np.float32(np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = np.asarray(a * x + (b * gram + c * (gram @ gram)) @ x, np.float32)
    found: Floats = x.T if rows > columns else x
    return found


def _directions(tensor: Tensor, rng: np.random.Generator) -> Iterator[tuple[slice, Floats]]:
    """Yield where the next step goes, in learning rates, a piece of the tensor at a time."""
    regime = tensor.regime
    keep = np.float32(regime.momentum)
    fresh = np.float32(regime.size * (1 - regime.momentum**2) ** 0.5)
    columns = tensor.shape[-1]
    chunk = max(columns, _CHUNK // columns * columns)
    if regime.orthogonal:
        chunk = len(tensor.masters)
    for at in range(0, len(tensor.masters), chunk):
        part = slice(at, min(at + chunk, len(tensor.masters)))
        momentum = tensor.momentum[part]
        momentum *= keep
        momentum += rng.standard_normal(len(momentum), np.float32) * fresh
        if regime.orthogonal:
            # The elements of an orthogonal matrix have a root mean square of 1/sqrt(longer side).
            size = np.float32(regime.size * max(tensor.shape) ** 0.5)
            yield part, orthogonalised(momentum.reshape(tensor.shape)).reshape(-1) * size
        elif tensor.rows_seen < 1:
            seen = rng.random(len(momentum) // columns) < tensor.rows_seen
            yield part, momentum * np.repeat(seen, columns)
        else:
            yield part, momentum


def _move(tensor: Tensor, part: slice, direction: Floats) -> None:
    masters = tensor.masters[part]
    masters -= direction * np.float32(tensor.regime.learning_rate)
    if not tensor.regime.masters:
        masters[:] = from_bf16(to_bf16(masters))


def _set_out(tensor: Tensor) -> None:
    """Publish a tensor before its first step."""
    if not tensor.regime.masters:
        tensor.masters = from_bf16(to_bf16(tensor.masters))
    _publish(tensor)


def _publish(tensor: Tensor) -> None:
    """Cast a tensor as the regime publishes it."""
    if tensor.regime.dtype == "BF16" or len(tensor.shape) == 1:
        codes = np.empty(len(tensor.masters), np.uint16)
        for at in range(0, len(codes), _CHUNK):
            codes[at : at + _CHUNK] = to_bf16(tensor.masters[at : at + _CHUNK])
        tensor.published = {tensor.name: ("BF16", tensor.shape, codes)}
        return
    rows, columns = tensor.shape
    masters = tensor.masters.reshape(tensor.shape)
    blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
    scales = np.empty(blocks, np.float32)
    codes8 = np.empty(tensor.shape, np.uint8)
    for row in range(blocks[0]):
        band = masters[row * _BLOCK : (row + 1) * _BLOCK]
        starts = np.arange(0, columns, _BLOCK)
        largest = np.maximum.reduceat(np.abs(band).max(axis=0), starts)
        scales[row] = np.maximum(largest / np.float32(448), np.float32(1e-12))
        spread = np.repeat(scales[row], _BLOCK)[:columns]
        codes8[row * _BLOCK : (row + 1) * _BLOCK] = to_e4m3(band / spread)
    tensor.published = {
        tensor.name: ("F8_E4M3", tensor.shape, codes8.reshape(-1)),
        f"{tensor.name}_scale_inv": ("F32", blocks, scales.reshape(-1)),
    }


def _shapes(elements: int) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Yield name, shape, scale and share of rows seen, as decoders have them, so many in all."""
    usual = 8 if elements < 400_000_000 else 24
    # 12 squares a layer hold four fifths, an embedding the rest
    hidden = max(1, round((elements * 0.8 / (12 * usual)) ** 0.5 / 64)) * 64
    layers = max(1, int(elements * 0.8 / (12 * hidden**2) + 0.25))
    wide = 8 * hidden // 3 // 64 * 64
    left = elements
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (hidden, hidden)),
            ("self_attn.v_proj", (hidden, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (wide, hidden)),
            ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)),
        ):
            # Scales of 0.025 to 0.06, growing with depth as in most models.
            yield f"{prefix}.{name}.weight", shape, 0.025 + 0.035 * layer / layers, 1.0
            left -= shape[0] * shape[1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (hidden,), 0.0, 1.0
            left -= hidden
    yield "model.embed_tokens.weight", (max(1, left // hidden), hidden), 0.05, _SEEN_ROWS


class Training:
    """A run: ``step`` moves the weights, ``write`` publishes a directory.

    Args:
        bytes_: About the size of a version.
        regime: How it trains.
        seed: Equal seeds make equal runs.
    """

    def __init__(self, bytes_: int, regime: Regime = REGIMES["adam"], seed: int = 0) -> None:
        self.regime = regime
        width = 2 if regime.dtype == "BF16" else 1
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self.tensors = list(
            self._pool.map(
                lambda entry: self._begin(entry[0] + 1000 * seed, *entry[1]),
                enumerate(_shapes(bytes_ // width)),
            )
        )

    def _begin(
        self, seed: int, name: str, shape: tuple[int, ...], scale: float, rows_seen: float
    ) -> Tensor:
        rng = np.random.default_rng((seed, 0))
        count = int(np.prod(shape))
        if scale:
            masters = rng.standard_normal(count, np.float32) * np.float32(scale)
        else:
            masters = 1 + rng.standard_normal(count, np.float32) * np.float32(0.1)
        regime = self.regime
        if regime.orthogonal and (len(shape) == 1 or rows_seen < 1):
            regime = replace(
                regime, momentum=_ADAM.momentum, size=_ADAM.size, orthogonal=_ADAM.orthogonal
            )
        momentum = rng.standard_normal(count, np.float32) * np.float32(regime.size)
        tensor = Tensor(name, shape, masters, momentum, regime, rows_seen=rows_seen, seed=seed)
        _set_out(tensor)
        return tensor

    def beside(self, regime: Regime) -> Training:
        """Return a run from the same weights along the same updates, which steps when this one does.

        Only its learning rate and what it publishes may be others. The noise, and for Muon most of
        the arithmetic, is made once for all.
        """
        other = copy.copy(self)
        other.regime = regime
        other.tensors = []
        for tensor in self.tensors:
            if tensor.steps or not tensor.regime.masters:
                raise ValueError("only beside a run with fp32 masters that has taken no steps")
            own = replace(
                tensor.regime,
                learning_rate=regime.learning_rate,
                masters=regime.masters,
                dtype=regime.dtype,
            )
            follower = replace(tensor, masters=tensor.masters.copy(), regime=own, beside=[])
            _set_out(follower)
            tensor.beside.append(follower)
            other.tensors.append(follower)
        return other

    def step(self, count: int = 1) -> None:
        """Take so many steps of the optimiser."""
        list(self._pool.map(lambda tensor: self._advance(tensor, count), self.tensors))

    def _advance(self, tensor: Tensor, count: int) -> None:
        together = [tensor, *tensor.beside]
        for _ in range(count):
            tensor.steps += 1
            rng = np.random.default_rng((tensor.seed, tensor.steps))
            for part, direction in _directions(tensor, rng):
                for one in together:
                    _move(one, part, direction)
        for one in together:
            _publish(one)

    def arrays(self) -> Iterator[tuple[str, str, tuple[int, ...], npt.NDArray[Any]]]:
        """Yield name, dtype, shape and codes of everything that is published."""
        for tensor in self.tensors:
            for name, (dtype, shape, codes) in tensor.published.items():
                yield name, dtype, shape, codes

    def safetensors(self) -> bytes:
        """Return everything as one file."""
        return _header(list(self.arrays())) + b"".join(a.tobytes() for *_, a in self.arrays())

    def write(self, directory: Path, files: int = 1) -> int:
        """Write a checkpoint directory of so many weight files; return its size."""
        directory.mkdir(parents=True, exist_ok=True)
        arrays = list(self.arrays())
        total = sum(codes.nbytes for *_, codes in arrays)
        (directory / "config.json").write_text(
            '{"model_type": "llama", "torch_dtype": "bfloat16"}\n'
        )
        parts: list[list[tuple[str, str, tuple[int, ...], npt.NDArray[Any]]]] = [[]]
        filled = 0
        for entry in arrays:
            if filled > total * len(parts) / files:
                parts.append([])
            parts[-1].append(entry)
            filled += entry[3].nbytes
        index: dict[str, str] = {}
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            name = "model.safetensors" if files == 1 else name
            index |= dict.fromkeys((entry[0] for entry in part), name)
            with (directory / name).open("wb") as file:
                file.write(_header(part))
                for *_, codes in part:
                    file.write(codes.data)
        if files > 1:
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (directory / "model.safetensors.index.json").write_text(text + "\n")
        return sum(path.stat().st_size for path in directory.iterdir())


def _header(entries: Sequence[tuple[str, str, tuple[int, ...], npt.NDArray[Any]]]) -> bytes:
    at, head = 0, {}
    for name, dtype, shape, codes in entries:
        head[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + codes.nbytes],
        }
        at += codes.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def main() -> None:
    """Write versions of a run."""
    parser = argparse.ArgumentParser(description="checkpoints of a made-up training run")
    parser.add_argument("out", type=Path, help="gets step-000, step-001, ...")
    parser.add_argument("--bytes", type=int, default=1_000_000_000)
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1, help="optimiser steps per version")
    parser.add_argument("--regime", choices=sorted(REGIMES), default="adam")
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    training = Training(options.bytes, REGIMES[options.regime], options.seed)
    for version in range(options.versions):
        if version:
            training.step(options.steps)
        directory = options.out / f"step-{version:03}"
        print(
            json.dumps({"path": str(directory), "bytes": training.write(directory, options.files)})
        )


if __name__ == "__main__":
    main()
