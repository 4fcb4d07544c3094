"""A checkpoint for the demonstration: a small decoder in bf16, as Hugging Face lays it out.

Deterministic: the same arguments give the same bytes. Weights are normal with sigma 0.02, as they
are at initialisation (GPT-2, Llama), so their exponents are spread like those of real models.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from shardcast.demo.safetensors import BF16_BYTES, Tensor, encode_header

BLOCK_ELEMENTS: Final = 1 << 20
"""Worked on at a time: bounds memory, and stays in the caches."""

SIGMA: Final = 0.02
VOCABULARY: Final = 8192

_INDEX: Final = "model.safetensors.index.json"
_ONE: Final = 0x3F80  # bf16 1.0, what norms start as

U16 = npt.NDArray[np.uint16]


def plan_tensors(total_bytes: int) -> list[Tensor]:
    """Return the tensors of a Llama-like decoder of about ``total_bytes`` (bf16)."""
    hidden = 64
    while hidden < 4096 and _layer_elements(hidden * 2) * BF16_BYTES * 8 <= total_bytes:
        hidden *= 2
    layer_bytes = _layer_elements(hidden) * BF16_BYTES
    vocabulary = min(VOCABULARY, max(64, total_bytes // (8 * hidden * BF16_BYTES)))
    embedding_bytes = vocabulary * hidden * BF16_BYTES
    layers = max(1, round((total_bytes - 2 * embedding_bytes) / layer_bytes))
    tensors = [Tensor("model.embed_tokens.weight", (vocabulary, hidden))]
    for number in range(layers):
        tensors += _layer(number, hidden)
    return [
        *tensors,
        Tensor("model.norm.weight", (hidden,)),
        Tensor("lm_head.weight", (vocabulary, hidden)),
    ]


def _layer(number: int, hidden: int) -> list[Tensor]:
    prefix = f"model.layers.{number}"
    wide = 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
    }
    return [Tensor(f"{prefix}.{name}.weight", shape) for name, shape in shapes.items()]


def _layer_elements(hidden: int) -> int:
    return sum(tensor.elements for tensor in _layer(0, hidden))


def write_checkpoint(directory: Path, total_bytes: int, *, files: int = 4, seed: int = 0) -> int:
    """Write a checkpoint directory; return the bytes of all its files.

    Args:
        directory: Made if missing.
        total_bytes: About how many bytes the weights take.
        files: Over how many safetensors files they are spread, at most.
        seed: Other seeds give other weights of the same shapes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    groups = _split(plan_tensors(total_bytes), files)
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(_write_file, directory / name, tensors, (seed, number))
            for number, (name, tensors) in enumerate(zip(names, groups, strict=True))
        ]
        for job in jobs:
            job.result()
    index = {
        "metadata": {"total_size": sum(t.elements for group in groups for t in group) * BF16_BYTES},
        "weight_map": {
            tensor.name: name
            for name, tensors in zip(names, groups, strict=True)
            for tensor in tensors
        },
    }
    _write_json(directory / _INDEX, index)
    _write_companions(directory, groups)
    return sum(path.stat().st_size for path in directory.iterdir())


def _write_file(path: Path, tensors: Sequence[Tensor], seed: tuple[int, int]) -> None:
    bits = np.random.SFC64(seed)
    with path.open("wb") as file:
        file.write(encode_header(tensors))
        for tensor in tensors:
            for block in _values(tensor, bits):
                file.write(block.data)


def _values(tensor: Tensor, bits: np.random.SFC64) -> Iterator[U16]:
    norm = len(tensor.shape) == 1
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        yield np.full(count, _ONE, "<u2") if norm else _normal_bf16()[uniform16(bits, count)]


def uniform16(bits: np.random.SFC64, count: int) -> U16:
    """Return ``count`` uniform 16-bit numbers from the generator's raw stream."""
    words = np.asarray(bits.random_raw(-(-count // 4)), dtype="<u8")
    return words.view("<u2")[:count]


@functools.cache
def normal_quantiles() -> npt.NDArray[np.float32]:
    """Return a table from 16 uniform bits to a standard normal value."""
    normal = statistics.NormalDist()
    values = [normal.inv_cdf((code + 0.5) / 65536) for code in range(65536)]
    return np.array(values, dtype=np.float32)


@functools.cache
def _normal_bf16() -> U16:
    return round_to_bf16(normal_quantiles() * np.float32(SIGMA))


def round_to_bf16(values: npt.NDArray[np.float32]) -> U16:
    """Round to the nearest bf16, ties to even, as hardware and torch do."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _split(tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Cut the tensors into at most ``parts`` runs of about equal size."""
    limit = sum(tensor.elements for tensor in tensors) / parts
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.elements / 2 > limit and len(groups) < parts:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.elements
    return groups


def _write_companions(directory: Path, groups: Sequence[Sequence[Tensor]]) -> None:
    """Write what stands beside the weights: config, generation config, tokenizer."""
    embedding = groups[0][0]
    vocabulary, hidden = embedding.shape
    layers = sum(t.name.endswith("input_layernorm.weight") for group in groups for t in group)
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "model_type": "llama",
            "num_attention_heads": max(1, hidden // 64),
            "num_hidden_layers": layers,
            "torch_dtype": "bfloat16",
            "vocab_size": vocabulary,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{n}": n for n in range(3, vocabulary)}
    _write_json(
        directory / "tokenizer.json",
        {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 4096, "unk_token": "<unk>"},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
