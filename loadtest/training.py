"""Checkpoints of a training run that never was, of any size: weights, and how steps change them.

    python -m loadtest.training OUT --bytes 1000000000 --versions 3 [--regime adam]

What a delta costs depends on which weights change and by how much, so the noise is a trainer's:
weights of a normal distribution, a scale for each tensor (and half as many of each smaller exponent, as
in any model); a step is what AdamW or Muon make of noisy gradients in their steady state: about the
same size for every weight, correlated from step to step by the momentum, with a small drift that stays.
Published is the cast of fp32 masters, or bf16 weights that lose an update that rounds away, or FP8 codes
quantised again from the masters. As in real fine-tuning embeddings change only in the rows of tokens
that were seen, and norms hardly at all. At learning rate 1e-6 about 0.44 % of the elements change, as
in the steps of all-MiniLM-L6-v2 that the codec was measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
        masters: Whether fp32 masters keep what rounds away.
        dtype: What is published: "BF16" or "F8_E4M3".
    """

    learning_rate: float = 1e-6
    momentum: float = 0.9
    size: float = 0.229
    masters: bool = True
    dtype: str = "BF16"


REGIMES: Final = {
    "adam": Regime(),
    "adam-bf16": Regime(masters=False),
    "adam-fp8": Regime(dtype="F8_E4M3"),
    "muon": Regime(momentum=0.95, size=0.2),
    "muon-bf16": Regime(momentum=0.95, size=0.2, masters=False),
}


@dataclass
class Tensor:
    """One parameter: its fp32 masters and the optimiser's momentum."""

    name: str
    shape: tuple[int, ...]
    masters: Floats
    momentum: Floats
    drift: float = 0.02
    rows_seen: float = 1.0
    seed: int = 0
    steps: int = 0
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
        if not self.regime.masters:
            masters = from_bf16(to_bf16(masters))
        momentum = rng.standard_normal(count, np.float32) * np.float32(self.regime.size)
        tensor = Tensor(name, shape, masters, momentum, rows_seen=rows_seen, seed=seed)
        self._publish(tensor)
        return tensor

    def step(self, count: int = 1) -> None:
        """Take so many steps of the optimiser."""
        list(self._pool.map(lambda tensor: self._advance(tensor, count), self.tensors))

    def _advance(self, tensor: Tensor, count: int) -> None:
        for _ in range(count):
            tensor.steps += 1
            rng = np.random.default_rng((tensor.seed, tensor.steps))
            keep = np.float32(self.regime.momentum)
            fresh = np.float32(self.regime.size * (1 - self.regime.momentum**2) ** 0.5)
            rate = np.float32(self.regime.learning_rate)
            columns = tensor.shape[-1]
            chunk = max(columns, _CHUNK // columns * columns)
            for at in range(0, len(tensor.masters), chunk):
                part = slice(at, min(at + chunk, len(tensor.masters)))
                momentum, masters = tensor.momentum[part], tensor.masters[part]
                momentum *= keep
                momentum += rng.standard_normal(len(momentum), np.float32) * fresh
                update = momentum * rate
                if tensor.rows_seen < 1:
                    seen = rng.random(len(momentum) // columns) < tensor.rows_seen
                    update *= np.repeat(seen, columns)
                masters -= update
                if not self.regime.masters:
                    masters[:] = from_bf16(to_bf16(masters))
        self._publish(tensor)

    def _publish(self, tensor: Tensor) -> None:
        """Cast a tensor as the regime publishes it."""
        if self.regime.dtype == "BF16" or len(tensor.shape) == 1:
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
