"""Checkpoints of any size as Hugging Face lays them out: deterministic bf16, made by streaming.

The values look like trained weights (normal, sigma 0.02), because delta codecs and file systems
must not be flattered by constants, and no two shards are equal. The same arguments give the same
bytes on every machine: raw bits of a counter-free generator whose stream numpy guarantees, mapped
through a table of normal quantiles.

Formats: safetensors (8-byte little-endian header length, JSON header, data) and the index file
`model.safetensors.index.json` that transformers writes beside several files.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MiB = 1 << 20

_BF16_BYTES = 2
_SIGMA = 0.02
_BLOCK_BYTES = 8 * MiB  # a block is what memory holds at a time
_STEP_SALT = 0x5EED  # keeps the choice of changed elements apart from the values


@dataclass(frozen=True)
class Tensor:
    """A named bf16 tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return int(np.prod(self.shape)) * _BF16_BYTES


def plan_tensors(total_bytes: int) -> list[Tensor]:
    """Return the tensors of a small decoder whose weights come to about `total_bytes`.

    The embedding takes what the layers leave, so the sum is within one row (a few KiB).
    """
    hidden = 64
    while hidden < 4096 and 24 * hidden * hidden * _BF16_BYTES * 16 < total_bytes:
        hidden *= 2
    layer = _layer(0, hidden)
    layer_bytes = sum(tensor.nbytes for tensor in layer)
    layers = max(1, int(total_bytes * 0.9) // layer_bytes)
    rows = max(1, (total_bytes - layers * layer_bytes) // (hidden * _BF16_BYTES))
    tensors = [Tensor("model.embed_tokens.weight", (rows, hidden))]
    for number in range(layers):
        tensors.extend(_layer(number, hidden))
    return tensors


def _layer(number: int, hidden: int) -> list[Tensor]:
    prefix = f"model.layers.{number}"
    square = (hidden, hidden)
    wide = (4 * hidden, hidden)
    return [
        Tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        *(Tensor(f"{prefix}.self_attn.{part}_proj.weight", square) for part in "qkvo"),
        Tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        Tensor(f"{prefix}.mlp.gate_proj.weight", wide),
        Tensor(f"{prefix}.mlp.up_proj.weight", wide),
        Tensor(f"{prefix}.mlp.down_proj.weight", (hidden, 4 * hidden)),
    ]


def write_checkpoint(
    directory: Path, total_bytes: int, *, weight_files: int = 4, seed: int = 0
) -> int:
    """Write a checkpoint directory and return the bytes of all its files.

    Args:
        directory: Where to write; made if missing.
        total_bytes: About how many bytes the weights take.
        weight_files: How many safetensors files they are split over.
        seed: Other seeds give other weights of the same shapes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    groups = _split(plan_tensors(total_bytes), weight_files)
    names = _weight_names(len(groups))
    index = {}
    for number, (name, tensors) in enumerate(zip(names, groups, strict=True)):
        size = sum(tensor.nbytes for tensor in tensors)
        with (directory / name).open("wb") as out:
            out.write(_header(tensors))
            for block in _blocks(size, seed=(seed, number)):
                out.write(block.data)
        index.update({tensor.name: name for tensor in tensors})
    _write_json(
        directory / "model.safetensors.index.json",
        {
            "metadata": {"total_size": sum(t.nbytes for group in groups for t in group)},
            "weight_map": index,
        },
    )
    _write_companions(directory)
    return bytes_below(directory)


def write_step(source: Path, directory: Path, *, changed: float = 0.0044, seed: int = 0) -> int:
    """Write the checkpoint that an optimiser step makes of `source`; return its bytes.

    About the share `changed` of the weights move to a neighbouring bf16 value (the last bit of
    the pattern flips), spread evenly as a step at a small learning rate spreads them; all other
    files stay as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        target = directory / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".safetensors":
            target.write_bytes(path.read_bytes())
            continue
        rng = np.random.Generator(np.random.SFC64((_STEP_SALT, seed, number)))
        with path.open("rb") as old, target.open("wb") as new:
            length = int.from_bytes(old.read(8), "little")
            old.seek(0)
            new.write(old.read(8 + length))
            _flip_blocks(old, new, changed, rng)
    return bytes_below(directory)


def bytes_below(directory: Path) -> int:
    """Return the sum of the sizes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _flip_blocks(old: BinaryIO, new: BinaryIO, changed: float, rng: np.random.Generator) -> None:
    while block := old.read(_BLOCK_BYTES):
        bits = np.frombuffer(block, dtype="<u2").copy()
        count = max(1, round(bits.size * changed))
        bits[rng.integers(0, bits.size, count)] ^= 1
        new.write(bits.data)


def _split(tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Cut a list into at most `parts` runs of about equal size, as transformers does."""
    limit = -(-sum(tensor.nbytes for tensor in tensors) // parts)
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes / 2 > limit and len(groups) < parts:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return groups


def _weight_names(count: int) -> list[str]:
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def _header(tensors: Sequence[Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts 8-byte aligned
    return len(text).to_bytes(8, "little") + text


@functools.cache
def _quantiles() -> npt.NDArray[np.uint16]:
    """Map 16 uniform bits to the bf16 pattern of a normal value."""
    normal = statistics.NormalDist(0.0, _SIGMA)
    values = np.array(
        [normal.inv_cdf((code + 0.5) / 65536) for code in range(65536)], dtype=np.float32
    )
    return (values.view(np.uint32) >> 16).astype("<u2")


def _blocks(size: int, *, seed: tuple[int, int]) -> Iterator[npt.NDArray[np.uint16]]:
    bits = np.random.SFC64(seed)
    table = _quantiles()
    for start in range(0, size, _BLOCK_BYTES):
        count = min(_BLOCK_BYTES, size - start) // _BF16_BYTES
        words = np.asarray(bits.random_raw(-(-count // 4)), dtype="<u8")
        yield table[words.view("<u2")[:count]]


def _write_companions(directory: Path) -> None:
    """Write what stands beside the weights: config, generation config, tokenizer files."""
    _write_json(
        directory / "config.json",
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_json(
        directory / "tokenizer.json",
        {"version": "1.0", "model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(20_000)}}},
    )
    _write_json(directory / "tokenizer_config.json", {"model_max_length": 32768})
    _write_json(directory / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Write one checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="write a deterministic bf16 checkpoint")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=200_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    written = write_checkpoint(
        options.directory, options.bytes, weight_files=options.files, seed=options.seed
    )
    print(json.dumps({"directory": str(options.directory), "bytes": written}))


if __name__ == "__main__":
    main()
