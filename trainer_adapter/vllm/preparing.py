"""A version's weights in the form that CPU kernels want, made while the engine serves.

On CPUs a load spends most of its time packing weights (oneDNN, SGL). Here that is done beside the
model, on a second tree of its modules, while the version is staged; in the pause the packed weights
change places, and only what is no packed copy (embeddings, norms, biases, experts) is copied, into
the memory that it had. It needs a second copy of the weights until the old ones are given back.

The bytes are read, not mapped: a file that shrinks meanwhile is an error, and after that no file is
needed for the load.

Only what is known to be loaded in that way is prepared (``Unprepared`` says what is not); everything
else goes through vLLM's own reload, in the pause. What was packed here is what vLLM's own methods
made of the same tensors, so both ways end in the same bits.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import chain
from typing import Any, Final

import torch
from vllm.model_executor.layers.attention import MLAAttention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from trainer_adapter.checkpoint import Checkpoint, StoppedError
from trainer_adapter.vllm.shadow import Arrivals, Counter
from trainer_adapter.vllm.threads import one_thread
from trainer_adapter.vllm.tree import Place, Tree

KERNEL: Final = "cpu_linear"
"""The attribute by which vLLM's CPU layers hold their kernel, packed weights included."""

_METHODS: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_OF_MODULES: Final = frozenset({"_parameters", "_buffers", "_modules"})


class Unprepared(Exception):  # noqa: N818 - no error: the load takes the other way
    """This model's weights cannot be prepared; the message says why."""


class Prepared:
    """Weights that only have to change places with the model's."""

    def __init__(
        self,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        kernels: list[tuple[torch.nn.Module, Any]],
    ) -> None:
        """Take what was prepared.

        Args:
            copies: The model's tensors, and what will be copied into each.
            kernels: The model's layers, and the kernel that each will have.
        """
        self._copies = copies
        self._kernels = kernels
        self._into = {id(old) for old, _ in copies}

    @property
    def bytes(self) -> int:
        """How much the copying copies."""
        return sum(new.numel() * new.element_size() for _, new in self._copies)

    def is_of(self, model: torch.nn.Module) -> bool:
        """Say whether what it writes to is still the model's: a reload that broke off has others."""
        there = {id(one): one for one in chain(model.parameters(), model.buffers())}
        if any(one.is_meta for one in there.values()):
            return False
        return self._into <= there.keys()

    def exchange(self) -> None:
        """Give the model these weights; keep its old kernels, to be thrown away."""
        for old, new in self._copies:
            old.data.copy_(new)
        for number, (layer, kernel) in enumerate(self._kernels):
            self._kernels[number] = layer, getattr(layer, KERNEL, None)
            setattr(layer, KERNEL, kernel)

    def close(self) -> None:
        """Give the memory back: in a thread, since for much memory that takes long."""
        litter: list[Any] = [self._copies, self._kernels]
        self._copies, self._kernels = [], []
        threading.Thread(target=_free, args=(litter,), name="shardcast-free", daemon=True).start()


def _free(litter: list[Any]) -> None:
    """Let it go, and have the C library give the system what lies idle in its arenas.

    It has one for every few threads and keeps what is freed there, which for each thread that has
    staged could be all the weights once.
    """
    litter.clear()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def prepare(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    arrivals: Mapping[str, Arrivals],
    *,
    tied: Mapping[str, str],
    stopping: Callable[[], bool],
) -> Prepared:
    """Prepare a verified version; the model is only looked at.

    Args:
        model: The model.
        checkpoint: The version.
        arrivals: What its dry run said (``Shadow.run``).
        tied: Output embeddings, and the input embeddings whose memory they share.
        stopping: Says when to give up.

    Raises:
        Unprepared: If that is not known to work for this model.
        StoppedError: If ``stopping`` said so.
        ShardcastError: If the version cannot be read.
    """
    _check_layers(model)
    building = _Building(model, arrivals, tied)
    try:
        with torch.no_grad(), one_thread():
            building.load(checkpoint, stopping)
            return building.result()
    finally:
        building.close()


class _Building:
    """The second tree, while it is filled."""

    def __init__(
        self, model: torch.nn.Module, arrivals: Mapping[str, Arrivals], tied: Mapping[str, str]
    ) -> None:
        self._model = model
        self._arrivals = arrivals
        self._tied = {f"{head}.weight": f"{embedding}.weight" for head, embedding in tied.items()}
        self._left: dict[int, int] = {}  # elements that a layer still waits for
        self._tree = Tree(model, self._make)

    def _make(self, place: Place, meta: torch.Tensor) -> torch.Tensor:
        loader = getattr(meta, "weight_loader", default_weight_loader)
        if not place.parameter:
            meta.weight_loader = _refusing(f"{place.name} is a buffer that is loaded")
            return meta
        if place.name in self._tied or place.name.rpartition(".")[2] in SKIP_LOAD_TENSORS:
            return meta
        found = self._arrivals.get(place.name)
        if found is None or found.elements < found.expected:
            raise Unprepared(f"{place.name} is not loaded as a whole")
        made = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype)
        made.__class__ = meta.__class__
        made.__dict__ = meta.__dict__.copy()
        module = place.module
        self._left[id(module)] = self._left.get(id(module), 0) + found.elements
        made.weight_loader = self._noting(loader, module, found.expected)
        return made

    def _noting(
        self, loader: Callable[..., Any], module: torch.nn.Module, most: int
    ) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            with Counter() as counter:
                result = loader(*args, **kwargs)
            before = self._left[id(module)]
            self._left[id(module)] = left = before - min(counter.written, most)
            if left <= 0 < before:  # its raw weights need not wait for the others'
                _process(module)
            return result

        noting.__signature__ = inspect.signature(loader)  # type: ignore[attr-defined]
        return noting

    def load(self, checkpoint: Checkpoint, stopping: Callable[[], bool]) -> None:
        """Let the model's own rules load it."""
        self._tree.root.load_weights(_until(stopping, checkpoint))
        waiting = [number for number in self._left.values() if number > 0]
        if waiting:
            raise Unprepared(f"{len(waiting)} layers were not loaded as in the dry run")
        for head, embedding in self._tied.items():
            layer = self._tree.root.get_submodule(head.rpartition(".")[0])
            source = self._tree.root.get_submodule(embedding.rpartition(".")[0])
            layer._parameters["weight"] = source._parameters["weight"]
            if KERNEL in source.__dict__ and _method(layer) is _method(source):
                setattr(layer, KERNEL, getattr(source, KERNEL))  # once for both
            else:
                _process(layer)

    def result(self) -> Prepared:
        """Return what differs from the model.

        Raises:
            Unprepared: If that is more than is known.
        """
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        kernels = []
        for name, live in self._model.named_modules():
            made = self._tree.of(live)
            if isinstance(live, UnquantizedFusedMoEMethod):
                continue  # the experts' kernel holds no weights
            self._check_attributes(name, live, made)
            for key, old in live._parameters.items():
                if old is None or key in SKIP_LOAD_TENSORS or id(old) in copies:
                    continue
                copies[id(old)] = old, _fitting(f"{name}.{key}", old, made._parameters.get(key))
            if made.__dict__.get(KERNEL) is not live.__dict__.get(KERNEL):
                kernels.append((live, made.__dict__[KERNEL]))
        return Prepared([pair for pair in copies.values() if pair[0].numel()], kernels)

    def _check_attributes(self, name: str, live: torch.nn.Module, made: torch.nn.Module) -> None:
        known = _OF_MODULES | {KERNEL}
        if isinstance(live.__dict__.get("quant_method"), UnquantizedFusedMoEMethod):
            known |= {"quant_method"}
        for key, value in made.__dict__.items():
            if key not in known and live.__dict__.get(key, self) is not value:
                raise Unprepared(f"{name} gets a new {key} when it is loaded")
        if more := set(made._parameters) - set(live._parameters):
            raise Unprepared(f"{name} has no {min(more)} once it is loaded")

    def close(self) -> None:
        """Take the tree apart."""
        self._tree.close()


def _check_layers(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _METHODS:
            raise Unprepared(f"{name} is processed by {type(method).__name__}")
        if isinstance(module, MLAAttention):
            raise Unprepared(f"{name} absorbs weights of other layers")
        if is_deferred_attention_layer(module) and module._parameters:
            raise Unprepared(f"{name} has weights of its own")


def _method(layer: torch.nn.Module) -> type[Any]:
    return type(getattr(layer, "quant_method", None))


def _process(layer: torch.nn.Module) -> None:
    """Have vLLM's own method make of a layer's weights what its kernel wants."""
    method: Any = getattr(layer, "quant_method", None)
    if method is None:
        return
    if isinstance(method, UnquantizedFusedMoEMethod):
        if not isinstance(method, torch.nn.Module):
            method = layer.__dict__["quant_method"] = copy(method)
        method.moe_kernel = None  # one that exists is taken for packed
    method.process_weights_after_loading(layer)


def _fitting(name: str, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    if new is None or new.is_meta:
        raise Unprepared(f"{name} is not made by loading")
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise Unprepared(f"{name} changes its form when it is loaded")
    return new.data


def _refusing(reason: str) -> Callable[..., Any]:
    def refusing(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise Unprepared(reason)

    return refusing


def _until(
    stopping: Callable[[], bool], checkpoint: Checkpoint
) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in checkpoint.tensors(copied=True):
        if stopping():
            raise StoppedError("given up for another version", source=str(checkpoint.directory))
        yield pair
