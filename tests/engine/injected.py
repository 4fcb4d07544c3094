"""What tests add to a rank (vLLM's ``worker_extension_cls``): faults, and a look at its memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer_adapter.checkpoint import Checkpoint


class Injected:
    """Methods that end up on vLLM's worker, to be called with ``collective_rpc``."""

    def arm(self, rank: int, place: str, after: int, times: int) -> int:
        """Let rank ``rank`` fail ``times`` times.

        ``place``: ``tensors``: the stream of tensors, or the copying of prepared ones, breaks off
        after so many; ``process``: a layer fails while it is processed for its kernel, or gets the
        one that was prepared; ``end``: right after the whole load; ``check``:
        while a version is compared with the model; ``die``: the process ends in the middle of it;
        ``stop``: it is stopped there, until somebody lets it go on (SIGCONT).
        """
        if int(getattr(self, "rank", 0)) == rank:
            _FAULTS.clear()
            _FAULTS.update(place=place, after=after, times=times)
            _install(self)
        return os.getpid()

    def judge(self, able: bool) -> None:
        """Let dry runs say what they find; or that they cannot, as for loaders that look at data."""
        from trainer_adapter.vllm.shadow import Shadow

        if not able:
            _SHADOW.setdefault("run", Shadow.run)
            Shadow.run = _unable  # type: ignore[method-assign]
        elif _SHADOW:
            Shadow.run = _SHADOW["run"]  # type: ignore[method-assign]

    def prepare_ahead(self, ahead: bool) -> None:
        """Prepare versions while they are staged, or do not."""
        getattr(self, "weight_transfer_engine").rank._weights._ahead = ahead  # noqa: B009

    def begin_reload(self) -> None:
        """Be somebody else's reload of the model, which has died before its first tensor."""
        from vllm.model_executor.model_loader.reload import layerwise

        layerwise.initialize_layerwise_reload(getattr(self, "model_runner").model)  # noqa: B009

    def load_nothing(self) -> str:
        """Load no tensors; return what is said to that."""
        weights = getattr(self, "weight_transfer_engine").rank._weights  # noqa: B009
        try:
            weights._load(iter(()))
        except RuntimeError as error:
            return str(error)
        return ""

    def spoil_wipe(self, how: str) -> None:
        """Let the next wipe of the KV memory do nothing (``skip``), or fail (``raise``)."""
        residue: Any = getattr(self, "weight_transfer_engine").rank._residue  # noqa: B009
        real = residue._memory.wipe

        def wipe() -> None:
            residue._memory.wipe = real
            if how == "raise":
                raise RuntimeError("injected: while the KV memory was wiped")

        residue._memory.wipe = wipe

    def bad_in_memory(self) -> float:
        """Return which share of the KV memory is NaN or infinite."""
        runner: Any = getattr(self, "model_runner")  # noqa: B009
        caches = runner.kv_caches
        bad = sum(int((~cache.isfinite()).sum()) for cache in caches)
        return bad / int(sum(cache.numel() for cache in caches))

    def open_files(self, below: str) -> list[str]:
        """Return what this process has open below a directory."""
        found = set()
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
        return sorted(path for path in found if path.startswith(below))

    def watch_memory(self) -> None:
        """Look at this process's anonymous memory from now on, every few milliseconds."""
        _WATCH.update(before=_anonymous(), highest=0)
        threading.Thread(target=_watch, daemon=True).start()

    def memory(self) -> dict[str, int]:
        """Return bytes of anonymous memory: when the watch began, at most since then, and now."""
        return {**_WATCH, "now": _anonymous()}


_WATCH: dict[str, int] = {}
_SHADOW: dict[str, Any] = {}


def _unable(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("injected: a loader looked at the data")


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _watch() -> None:
    while True:
        _WATCH["highest"] = max(_WATCH["highest"], _anonymous())
        threading.Event().wait(0.002)


_FAULTS: dict[str, Any] = {}


def _due(place: str) -> bool:
    if _FAULTS.get("place") != place or _FAULTS.get("times", 0) <= 0:
        return False
    _FAULTS["times"] -= 1
    return True


def _install(worker: Any) -> None:
    """Put the faults between the rank and its model; once."""
    weights = worker.weight_transfer_engine.rank._weights
    if getattr(weights, "_injected", False):
        return
    weights._injected = True
    whole, single, exchange = weights.load, weights._load, weights.load_prepared
    verifier = worker.weight_transfer_engine.rank._verifier
    prepare = verifier._prepare

    def check(checkpoint: Checkpoint, stopping: Callable[[], bool]) -> Any:
        if _due("check"):
            raise RuntimeError("injected: while it was checked")
        return prepare(checkpoint, stopping)

    verifier._prepare = check

    def load(checkpoint: Checkpoint) -> None:
        whole(checkpoint)
        if _due("end"):
            raise RuntimeError("injected: after the load")

    def _load(tensors: Iterator[tuple[str, Any]]) -> None:
        if _due("process"):
            with _failing_layer(_FAULTS["after"]):
                single(tensors)
        else:
            single(_breaking(tensors))

    def load_prepared(prepared: Any) -> bool:
        prepared._copies = _Breaking(prepared._copies, "tensors")
        prepared._kernels = _Breaking(prepared._kernels, "process")
        exchanged: bool = exchange(prepared)
        if exchanged and _due("end"):
            raise RuntimeError("injected: after the load")
        return exchanged

    weights.load, weights._load, weights.load_prepared = load, _load, load_prepared


class _Breaking(list[Any]):
    """What is prepared, which breaks off when it is used."""

    def __init__(self, prepared: list[Any], place: str) -> None:
        super().__init__(prepared)
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        whole = super().__iter__()
        if self._place == "tensors":
            return _breaking(whole, most=len(self) - 1)
        return _breaking_off(whole, min(_FAULTS["after"], len(self) - 1))


def _breaking_off(whole: Iterator[Any], after: int) -> Iterator[Any]:
    limit = after if _due("process") else None
    for number, one in enumerate(whole):
        if number == limit:
            raise RuntimeError("injected: while a layer got its kernel")
        yield one


def _breaking(tensors: Iterator[Any], *, most: int = 1000) -> Iterator[Any]:
    after = min(_FAULTS["after"], most)
    limit = after if _due("tensors") else None
    death = after if _due("die") else None
    halt = after if _due("stop") else None
    for number, one in enumerate(tensors):
        if death is not None and number >= death:
            os._exit(9)
        if number == halt:
            os.kill(os.getpid(), signal.SIGSTOP)
        if limit is not None and number >= limit:
            raise RuntimeError("injected: in the middle of the tensors")
        yield one


class _failing_layer:  # noqa: N801 - a context manager
    """vLLM's processing of layers fails at the n-th."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __enter__(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        self._module, self._original = layerwise, layerwise._copy_and_restore_kernel_tensors

        def failing(layer: Any, info: Any) -> None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("injected: while a layer was processed")
            self._original(layer, info)

        layerwise._copy_and_restore_kernel_tensors = failing

    def __exit__(self, *exc: object) -> None:
        self._module._copy_and_restore_kernel_tensors = self._original
