"""Whether a version's tensors fit a torch module, before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]

_ALIGNED: Final = 16
"""Bytes of torch's largest element."""
_SHOWN: Final = 5
"""Names in a message: enough to see what kind they are of."""


def misfits(module: torch.nn.Module, tensors: Tensors) -> str | None:
    """Say why a version does not fit a module, None if it does."""
    places = list(places_of(module))
    here = {memory_of(parameter) for name, parameter in places if name in tensors}
    missing = [
        name
        for name, parameter in places
        if name not in tensors and memory_of(parameter) not in here  # else it is tied to one
    ]
    if missing:
        return f"the version lacks {_names(missing)}"
    known = {name for name, _ in places}
    extra = [name for name in tensors if name not in known]
    if extra:
        return f"the version has {_names(extra)}, which the module has not"
    for name, parameter in places:
        if parameter.is_meta:
            return f"{name} of the module is on the meta device: nothing can be loaded into it"
        tensor = tensors.get(name)
        if tensor is None:
            continue
        theirs, ours = (tuple(one.shape) for one in (tensor, parameter))
        if theirs != ours or tensor.dtype != parameter.dtype:
            return (
                f"{name} is {list(theirs)} of {tensor.dtype} in the version and {list(ours)} of "
                f"{parameter.dtype} in the module"
            )
    return _contradiction([(n, p) for n, p in places if n in tensors], tensors)


def places_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under every name that they have."""
    yield from module.state_dict(keep_vars=True).items()


def memory_of(parameter: torch.Tensor) -> tuple[str, int, int]:
    """Return where a tensor lies: device, address, elements."""
    return str(parameter.device), parameter.data_ptr(), parameter.numel()


def _contradiction(places: Iterable[tuple[str, torch.Tensor]], tensors: Tensors) -> str | None:
    """Say which tensors differ though they belong into the same memory: the last would win."""
    import torch

    for group in _sharing(places):
        low = group[0][1].data_ptr() // _ALIGNED * _ALIGNED
        scratch = torch.empty(max(_end(one) for _, one in group) - low, dtype=torch.uint8)
        views = {}
        for name, parameter in group:
            offset = (parameter.data_ptr() - low) // parameter.element_size()
            views[name] = torch.empty(0, dtype=parameter.dtype).set_(
                scratch.untyped_storage(), offset, parameter.size(), parameter.stride()
            )
            views[name].copy_(tensors[name].detach())
        if not all(same_bits(view, tensors[name]) for name, view in views.items()):
            return f"{_names(list(views))} share memory in the module, and differ in the version"
    return None


def _sharing(
    places: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield those whose memory overlaps, by rising address."""
    group: list[tuple[str, torch.Tensor]] = []
    end = ("", 0)
    for name, parameter in sorted(places, key=lambda one: memory_of(one[1])):
        device, start, elements = memory_of(parameter)
        if elements == 0:
            continue
        if device != end[0] or start >= end[1]:
            if len(group) > 1:
                yield group
            group, end = [], (device, 0)
        group.append((name, parameter))
        end = device, max(end[1], _end(parameter))
    if len(group) > 1:
        yield group


def _end(parameter: torch.Tensor) -> int:
    """Return the address behind its last element."""
    steps = zip(parameter.size(), parameter.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    end: int = parameter.data_ptr() + (last + 1) * parameter.element_size()
    return end


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two are equal to the last bit; NaN equals itself."""
    import torch

    bits = (tensor.cpu().reshape(-1).view(torch.uint8) for tensor in (one, other.detach()))
    return bool(torch.equal(*bits))


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
