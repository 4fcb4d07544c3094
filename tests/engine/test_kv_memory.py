"""NaN in a KV cache's memory is found however a layer's part of it lies there, and wiped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from trainer_adapter.vllm import kv_memory
from trainer_adapter.vllm.kv_memory import KvMemory

CPU = torch.device("cpu")
LAYERS, BLOCKS, REST = 3, 5, (2, 4, 8)


@dataclass
class Layer:
    kv_cache: Any = field(default_factory=lambda: torch.tensor([]))
    sliding_window: int | None = None


class Other(Layer):
    """A layer of another class."""


def layer_by_layer(dtype: torch.dtype) -> list[torch.Tensor]:
    return list(torch.zeros(LAYERS, BLOCKS, *REST, dtype=dtype))


def block_by_block(dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.zeros(BLOCKS, LAYERS, *REST, dtype=dtype)
    return [whole[:, layer] for layer in range(LAYERS)]


def keys_apart_from_values(dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.zeros(2, LAYERS, BLOCKS, 4, 8, dtype=dtype)
    return [whole[:, layer] for layer in range(LAYERS)]


def turned_round(dtype: torch.dtype) -> list[torch.Tensor]:
    return [one.transpose(-1, -2) for one in layer_by_layer(dtype)]


LAYOUTS = [layer_by_layer, block_by_block, keys_apart_from_values, turned_round]


def memory(tensors: list[Any], kind: type[Layer] = Layer) -> KvMemory:
    return KvMemory({f"layers.{n}": kind(one) for n, one in enumerate(tensors)}, device=CPU)


@pytest.mark.parametrize("piece", [32, 256, 4 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_of_the_last_layer_is_looked_at(
    layout: Any, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "PIECE_BYTES", piece)
    tensors = layout(dtype)
    held = memory(tensors)
    assert held.look() == ""
    last = tensors[-1]
    for place in torch.cartesian_prod(*(torch.arange(size) for size in last.shape)):
        where = tuple(place.tolist())
        last[where] = float("nan")
        assert "layers.2" in str(held.look()), where
        last[where] = 0.0
    last[(0,) * last.ndim] = -float("inf")
    assert held.look()
    held.wipe()
    assert held.look() == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layers_are_wiped(layout: Any) -> None:
    tensors = layout(torch.bfloat16)
    for one in tensors:
        one.fill_(float("nan"))
    memory(tensors).wipe()
    assert all(not one.any() for one in tensors)


def test_the_last_of_each_kind_is_looked_at() -> None:
    full, window, other = (torch.zeros(BLOCKS, *REST) for _ in range(3))
    layers = {
        "0": Layer(window, sliding_window=128),
        "1": Other([torch.zeros(4), other]),
        "2": Layer(full),
        "3": Layer(),  # has no memory
        "4": object(),
    }
    held = KvMemory(layers, device=CPU)
    assert held.look() == ""
    for name, one in (("0", window), ("1", other), ("2", full)):
        one[2, 1, 3, 5] = float("nan")
        assert str(held.look()).startswith(f"{name} has keys or values")
        held.wipe()
        assert held.look() == ""


def test_what_cannot_be_seen_is_no_answer() -> None:
    nan = torch.full((BLOCKS, *REST), float("nan"))
    assert memory([torch.zeros(8, dtype=torch.uint8)]).look() is None
    assert memory([nan]).look(lambda: True) is None  # called off
    assert KvMemory({"0": Layer(nan)}, device=torch.device("meta")).look() is None
    assert KvMemory({}, device=CPU).look() == ""
