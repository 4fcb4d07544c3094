"""Asking a model whether it could load a version, without touching it: a dry run on a shadow.

The shadow is the same tree of modules with parameters on the meta device, as vLLM recorded them
before it processed them for its kernels. The model's own ``load_weights`` runs on it with meta
tensors of the version's names, shapes and types. So every rule is the model's: which names are
renamed, fused, sharded, ignored. What arrives where is counted; a parameter that got only a part of
its elements lacks a tensor of its group (the q of qkv), and would be filled up with whatever lies in
memory by vLLM's reload.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    SKIP_LOAD_TENSORS,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from shardcast.errors import EngineRefusedError
from trainer_adapter.checkpoint import Spec

log = logging.getLogger("shardcast.vllm")

_MOST_NAMED: Final = 5
_WRAPPER: Final = "online_process_loader"
"""The name of the loaders that vLLM's layerwise reload puts around the layers' own."""


@dataclass
class Arrivals:
    """What arrived at one parameter."""

    name: str
    expected: int
    elements: int = 0
    sources: list[str] = field(default_factory=list)


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the elements that are written: copied, or filled in as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("copy_", "fill_", "zero_"):
            self.written += args[0].numel()
            self.copied += args[0].numel() if name == "copy_" else 0
        return func(*args, **(kwargs or {}))


def refuse(problem: str) -> EngineRefusedError:
    """Return the error that says that a version is not one for this model."""
    return EngineRefusedError(problem, phase="check", reason="incompatible")


class Shadow:
    """A shadow of a model, for one dry run."""

    def __init__(self, model: torch.nn.Module, *, ranks: int) -> None:
        """Make the shadow; the model is only looked at.

        Args:
            model: The model.
            ranks: Over how many ranks a tensor may be cut.
        """
        self._ranks = ranks
        self._current = ""
        self._problems: list[str] = []
        self._shadows: dict[int, torch.nn.Module] = {}
        self._arrivals: dict[int, Arrivals] = {}
        self._parameters: dict[str, int] = {}
        self._kept: list[torch.Tensor] = []
        modules = dict(model.named_modules())
        for module in modules.values():
            clone = object.__new__(type(module))
            clone.__dict__.update(module.__dict__)
            self._shadows[id(module)] = clone
        for name, module in modules.items():
            self._fill(name, module)
        self._model = self._shadows[id(model)]

    # --- making it --------------------------------------------------------------------------

    def _fill(self, prefix: str, module: torch.nn.Module) -> None:
        clone = self._shadows[id(module)]
        clone.__dict__["_modules"] = {
            name: None if child is None else self._shadows[id(child)]
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
            clone.__dict__[kind] = {
                name: self._meta(f"{prefix}.{name}".lstrip("."), tensor, module, kind)
                for name, tensor in there.items()
            }

    def _meta(
        self, name: str, tensor: torch.Tensor, module: torch.nn.Module, kind: str
    ) -> torch.Tensor:
        clone = to_meta_tensor(tensor)
        self._kept.append(clone)  # ids stay theirs
        for key, value in clone.__dict__.items():
            clone.__dict__[key] = self._bound(value, module)
        if kind == "_parameters" and name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
            self._arrivals[id(clone)] = Arrivals(name, get_tensor_load_numel(clone))
            self._parameters[name] = id(clone)
            loader = getattr(clone, "weight_loader", default_weight_loader)
            clone.weight_loader = self._counting(loader)
        return clone

    def _bound(self, value: Any, module: torch.nn.Module) -> Any:
        """Return an attribute of a parameter as it is on the shadow: methods bound to shadows."""
        while getattr(value, "__name__", "") == _WRAPPER:
            value = value.__wrapped__
        if isinstance(value, MethodType):
            owner = module if value.__self__ is layer_ref_sentinel else value.__self__
            return value.__func__.__get__(self._shadows.get(id(owner), owner))
        return value

    # --- the dry run ------------------------------------------------------------------------

    def _counting(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def counting(*args: Any, **kwargs: Any) -> Any:
            param, loaded = [*signature.bind(*args, **kwargs).arguments.values()][:2]
            arrivals = self._arrivals.get(id(param))
            source = self._current
            counter = _Counter()
            try:
                with counter:
                    result = loader(*args, **kwargs)
            except NotImplementedError:
                raise
            except (AssertionError, RuntimeError, ValueError, IndexError, TypeError) as error:
                if "meta" in str(error):
                    raise NotImplementedError(str(error)) from error
                where = "a parameter" if arrivals is None else arrivals.name
                raise refuse(
                    f"{source} of shape {list(loaded.shape)} does not fit {where} of shape "
                    f"{list(param.shape)}"
                ) from error
            if arrivals is not None:
                self._note(arrivals, param, loaded, counter)
            return result

        return counting

    def _note(
        self, arrivals: Arrivals, param: torch.Tensor, loaded: torch.Tensor, counter: _Counter
    ) -> None:
        arrivals.elements += min(counter.written, arrivals.expected)
        if counter.written:
            arrivals.sources.append(self._current)
        if counter.copied and counter.copied * self._ranks < loaded.numel():
            self._problems.append(
                f"{self._current} of shape {list(loaded.shape)} is larger than {arrivals.name} of "
                f"shape {list(param.shape)} takes"
            )
        if counter.copied and not _converts(loaded.dtype, param.dtype):
            self._problems.append(
                f"{self._current} is {_name(loaded.dtype)}, {arrivals.name} is {_name(param.dtype)}"
            )

    def run(
        self, specs: Iterable[Spec], *, tied: Iterable[str], strict: bool
    ) -> dict[str, Arrivals]:
        """Load it, dry; return what arrived at each parameter.

        Args:
            specs: The version's tensors, in the order of loading.
            tied: Parameters that share another one's memory, and need nothing of their own.
            strict: Whether every parameter must be loaded from the version (vLLM's own rule for
                models without quantisation).

        Raises:
            EngineRefusedError: If the model cannot take it; names the tensors.
            NotImplementedError: If the model's loaders look at the data, which a shadow has not.
        """
        try:
            loaded = self._model.load_weights(self._stream(specs))
        except (ValueError, KeyError) as error:
            raise refuse(f"{self._current} has no place in this model: {_brief(error)}") from error
        for name, key in self._parameters.items():
            arrivals = self._arrivals[key]
            known = arrivals.elements or loaded is None or name in loaded
            if 0 < arrivals.elements < arrivals.expected:
                self._problems.append(
                    f"{name} gets {arrivals.elements} of its {arrivals.expected} elements, from "
                    f"{', '.join(arrivals.sources[:_MOST_NAMED])}: a tensor of its group is missing"
                )
            elif strict and not known and name not in tied:
                self._problems.append(f"nothing is loaded into {name}")
        if self._problems:
            raise refuse(_listed(self._problems))
        return {name: self._arrivals[key] for name, key in self._parameters.items()}

    def close(self) -> None:
        """Take the shadow apart: a cycle of garbage would keep the kernels' packed weights alive."""
        for clone in self._shadows.values():
            clone.__dict__.clear()
        for tensor in self._kept:
            tensor.__dict__.clear()
        self._kept.clear()

    def _stream(self, specs: Iterable[Spec]) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in specs:
            self._current = spec.name
            yield (
                spec.name,
                torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta"),
            )


def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Say whether a copy keeps what numbers mean: real floats become each other, nothing else."""
    wide = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    return source == target or (source in wide and target in wide)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _brief(error: Exception) -> str:
    return str(error).split(" The available", 1)[0][:300]


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MOST_NAMED
    return "; ".join(problems[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
