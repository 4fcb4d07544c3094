"""A second tree of a model's modules, with tensors of its own: loading into it leaves the model alone.

The modules are shallow copies of the model's, so every rule is the model's own: which names are
renamed, fused, sharded, ignored. Their parameters and buffers are what vLLM recorded of the model
before it processed them for its kernels, made by whoever builds the tree (on the meta device, or in
memory), and weight loaders that are bound to a module are bound to its copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, Protocol

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

_WRAPPER: Final = "online_process_loader"
"""The name of the loaders that vLLM's layerwise reload puts around the layers' own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs: ``name`` in the whole model, in a module of the second tree."""

    name: str
    module: torch.nn.Module
    parameter: bool


class Make(Protocol):
    """Makes the tensors of a second tree."""

    def __call__(self, place: Place, meta: torch.Tensor) -> torch.Tensor:
        """Return what stands at that place.

        Args:
            place: Where.
            meta: A tensor of its class, attributes, shape and type on the meta device, this tree's.
        """
        ...


class Tree:
    """A second tree of modules.

    Attributes:
        root: The copy of the model.
    """

    def __init__(self, model: torch.nn.Module, make: Make) -> None:
        """Copy the modules; the model is only looked at.

        Args:
            model: The model.
            make: Makes each tensor.
        """
        self._make = make
        self._copies: dict[int, torch.nn.Module] = {}
        modules = dict(model.named_modules())
        for module in modules.values():
            copied = object.__new__(type(module))
            copied.__dict__.update(module.__dict__)
            self._copies[id(module)] = copied
        for name, module in modules.items():
            self._fill(name, module)
        self.root = self._copies[id(model)]

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the copy of a module of the model."""
        return self._copies[id(module)]

    def close(self) -> None:
        """Take the tree apart: a cycle of garbage would keep what its layers hold alive."""
        for copied in self._copies.values():
            copied.__dict__.clear()

    def _fill(self, prefix: str, module: torch.nn.Module) -> None:
        copied = self._copies[id(module)]
        copied.__dict__["_modules"] = {
            name: None if child is None else self._copies[id(child)]
            for name, child in module._modules.items()
        }
        parameters, buffers = get_layerwise_info(module).restore_metadata
        for kind, recorded, live in (
            ("_parameters", parameters, module._parameters),
            ("_buffers", buffers, module._buffers),
        ):
            there = {
                name: recorded.get(name, tensor)
                for name, tensor in {**live, **recorded}.items()
                if recorded.get(name, tensor) is not None
            }
            copied.__dict__[kind] = {
                name: self._made(
                    Place(f"{prefix}.{name}".lstrip("."), copied, kind == "_parameters"),
                    tensor,
                    module,
                )
                for name, tensor in there.items()
            }

    def _made(self, place: Place, tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
        meta = to_meta_tensor(tensor)
        for key, value in meta.__dict__.items():
            meta.__dict__[key] = self._bound(value, module)
        return self._make(place, meta)

    def _bound(self, value: Any, module: torch.nn.Module) -> Any:
        """Return an attribute of a tensor as it is in this tree: methods bound to copies."""
        while getattr(value, "__name__", "") == _WRAPPER:
            value = value.__wrapped__
        if isinstance(value, MethodType):
            owner = module if value.__self__ is layer_ref_sentinel else value.__self__
            return value.__func__.__get__(self._copies.get(id(owner), owner))
        return value
