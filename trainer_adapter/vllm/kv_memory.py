"""The memory of an engine's KV cache: does NaN lie in it, and out with it.

Attention kernels read whole blocks. What a request has not written in a block is given the weight
zero, and zero times NaN is NaN: so what some weights have left there reaches those that come later.
vLLM hands the memory out zeroed when it starts, and zeroes it never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shardcast.finite import FORMATS, PIECE_BYTES, first_bad
from trainer_adapter.specs import NAMES


class KvMemory:
    """The KV cache of one rank, by the layers that it belongs to."""

    def __init__(self, layers: Mapping[str, Any], *, device: torch.device) -> None:
        """Take layers that may get their memory later.

        Args:
            layers: Of those with a ``kv_cache``, by name, in the order in which they compute
                (vLLM's ``static_forward_context``).
            device: Where it lies.
        """
        self._layers = layers
        self._device = device

    def wipe(self) -> None:
        """Fill it with zeros, as it was when the engine started."""
        whole = {}
        for layer in self._layers.values():
            for tensor in _tensors(layer):
                storage = tensor.untyped_storage()
                whole[storage.data_ptr()] = (storage, tensor.device)
        for storage, device in whole.values():
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).zero_()

    def look(self, stopping: Callable[[], bool] = lambda: False) -> str | None:
        """Look for NaN and infinities where the last layers keep their keys and values.

        What is no number in a token's way through the model reaches every layer behind: so the last
        layer of each kind tells for all. One thread, which reads what others write meanwhile.

        Returns:
            Which layer; empty where there are none; None where it cannot be seen: not on the CPU,
            or in a type that keeps no floating-point numbers.
        """
        if self._device.type != "cpu":
            return None
        last = {_kind(layer): name for name, layer in self._layers.items() if [*_tensors(layer)]}
        for name in last.values():
            for tensor in _tensors(self._layers[name]):
                form = FORMATS.get(NAMES.get(str(tensor.dtype).removeprefix("torch."), ""))
                if form is None:
                    return None
                for piece in _pieces(tensor):
                    if stopping():
                        return None
                    if first_bad(piece, form) is not None:
                        return f"{name} has keys or values that are NaN or infinite"
        return ""


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    held = getattr(layer, "kv_cache", None)
    found: Iterable[Any] = held if isinstance(held, (list, tuple)) else [held]
    for one in found:
        if isinstance(one, torch.Tensor) and one.numel():
            yield one


def _kind(layer: Any) -> tuple[type, object]:
    """Tell apart what has blocks of its own: layers of other classes, or with another window."""
    return type(layer), getattr(layer, "sliding_window", None)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in pieces of a few MiB, however it lies in its memory."""
    if tensor.is_contiguous():
        flat = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from _pieces(row)
        return
    rows = PIECE_BYTES // row_bytes
    for start in range(0, len(tensor), rows):
        piece = tensor[start : start + rows]
        if piece.stride(-1) != 1:
            piece = piece.contiguous()
        # Copied by numpy: torch would take all cores for it, from an engine that serves.
        yield np.ascontiguousarray(piece.view(torch.uint8).numpy()).reshape(-1).data
