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
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from trainer_adapter.specs import Spec
from trainer_adapter.vllm.started import MOST_NAMED, listed, refuse
from trainer_adapter.vllm.tree import Place, Tree

log = logging.getLogger("vllm.shardcast")


@dataclass
class Arrivals:
    """What arrived at one parameter."""

    name: str
    expected: int
    elements: int = 0
    sources: list[str] = field(default_factory=list)


class Counter(TorchDispatchMode):  # type: ignore[misc]
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
        self._arrivals: dict[int, Arrivals] = {}
        self._parameters: dict[str, int] = {}
        self._kept: list[torch.Tensor] = []  # so that ids stay theirs
        self._tree = Tree(model, self._note_place)

    def _note_place(self, place: Place, meta: torch.Tensor) -> torch.Tensor:
        if place.parameter and place.name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
            self._arrivals[id(meta)] = Arrivals(place.name, get_tensor_load_numel(meta))
            self._parameters[place.name] = id(meta)
            loader = getattr(meta, "weight_loader", default_weight_loader)
            meta.weight_loader = self._counting(loader)
            self._kept.append(meta)
        return meta

    # --- the dry run ------------------------------------------------------------------------

    def _counting(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def counting(*args: Any, **kwargs: Any) -> Any:
            param, loaded = [*signature.bind(*args, **kwargs).arguments.values()][:2]
            arrivals = self._arrivals.get(id(param))
            source = self._current
            counter = Counter()
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
        self, arrivals: Arrivals, param: torch.Tensor, loaded: torch.Tensor, counter: Counter
    ) -> None:
        arrivals.elements += min(counter.written, arrivals.expected)
        if counter.written:
            arrivals.sources.append(self._current)
        if counter.copied and counter.written * self._ranks < loaded.numel():  # with its padding
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
            loaded = self._tree.root.load_weights(self._stream(specs))
        except (ValueError, KeyError) as error:
            raise refuse(f"{self._current} has no place in this model: {_brief(error)}") from error
        for name, key in self._parameters.items():
            arrivals = self._arrivals[key]
            known = arrivals.elements or loaded is None or name in loaded
            if 0 < arrivals.elements < arrivals.expected:
                self._problems.append(
                    f"{name} gets {arrivals.elements} of its {arrivals.expected} elements, from "
                    f"{', '.join(arrivals.sources[:MOST_NAMED])}: a tensor of its group is missing"
                )
            elif strict and not known and name not in tied:
                self._problems.append(f"nothing is loaded into {name}")
        if self._problems:
            raise refuse(listed(self._problems))
        return {name: self._arrivals[key] for name, key in self._parameters.items()}

    def close(self) -> None:
        """Take the shadow apart."""
        self._tree.close()
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
