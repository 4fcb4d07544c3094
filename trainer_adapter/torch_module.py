"""A torch module that takes new weights in place, under the same protocol as an inference server.

For evaluation loops, small services and rollouts made with plain transformers::

    engine = TorchEngine(model)                        # any torch.nn.Module
    with engine.serving():                             # around every forward pass
        model.generate(...)
    await engine.activate(target)                      # or let an ``Agent`` do it

Parameters keep their storage, so whatever holds them (an optimiser, a captured graph) goes on with the
new values. A model and a version fit together if every parameter has a tensor of its name, shape and
type. Tied parameters need one of their names; where several are there, they must be equal. Where
transformers saves a model under other names than it holds it (experts that it fuses), give
``load=transformers_tensors``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardcast.canary import Canary, Prompt
from shardcast.engine.driver import Swapped, Target, reason_of
from shardcast.engine.forms import DEFAULT_LEASE_SECONDS, EngineState, Identity, Phase
from shardcast.engine.ledger import Ledger, Watch
from shardcast.errors import EngineRefusedError, ShardcastError
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.torch_fit import Tensors, memory_of, misfits, places_of

if TYPE_CHECKING:
    import torch

Load = Callable[["torch.nn.Module", Checkpoint], Tensors]
"""Returns a version's tensors under the names that the module has for them: those of
``Checkpoint.tensors``, or others in memory of their own, which no file can change."""
Copy = Callable[["torch.Tensor", "torch.Tensor"], object]
Score = Callable[["torch.nn.Module", Sequence[int]], list[float]]
_Held = tuple[Target, Checkpoint, Tensors]
_T = TypeVar("_T")


class TorchEngine:
    """A module in this process.

    Attributes:
        name: What people call it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str = "torch",
        load: Load | None = None,
        copy: Copy | None = None,
        score: Score | None = None,
        lease_s: float = DEFAULT_LEASE_SECONDS,
    ) -> None:
        """Change nothing yet.

        Args:
            module: Its weights are overwritten, not replaced.
            name: What people call it.
            load: Reads a version; None: tensors as they are named in its files.
            copy: Copies the second tensor into the first; None: ``copy_``.
            score: Returns log-probabilities; None: of a causal language model as transformers has it.
            lease_s: How long an activation waits for the forward passes under way.
        """
        self.name = name
        self._module = module
        self._load = load or named_tensors
        self._copy = copy or _copy
        self._score = score or prompt_logprobs
        self._lease_s = lease_s
        self._gate = Gate()
        self._turn = asyncio.Lock()
        self._ledger = Ledger("torch", "wait")
        self._staged: _Held | None = None
        self._served: _Held | None = None
        self._poisoned = False

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Keep the weights as they are while the block runs; wait while they are being changed.

        Raises:
            EngineRefusedError: If nobody knows what the weights are: activate a version first.
        """
        with self._gate.serving():
            if self._poisoned:
                raise self._error(
                    "serve",
                    "dead",
                    "a load broke off and nobody knows which weights it has: activate a version",
                )
            yield

    # --- the protocol -----------------------------------------------------------------------

    async def state(self) -> EngineState:
        """Return what it says about itself."""
        held = self._served  # once: a swap in its thread may take it away
        served = None if held is None else held[0].identity
        return self._ledger.state(
            served, paused=self._gate.paused or self._poisoned, poisoned=self._poisoned
        )

    async def stage(self, target: Target) -> EngineState:
        """Verify a version, check that it fits, hold it. Cancellation waits for its end."""
        await self._in_turn(lambda: asyncio.to_thread(self._stage, target))
        return await self.state()

    async def activate(self, target: Target) -> Swapped:
        """Wait for the forward passes under way, copy, go on. Cancellation waits for its end."""
        if self._turn.locked():
            raise self._error("pause", "busy", "it is being staged or activated already")
        return await self._in_turn(lambda: self._activate(target))

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Do it when nothing else is done, and to its end: its thread cannot be stopped."""
        cancelled: asyncio.CancelledError | None = None
        async with self._turn:
            running = asyncio.ensure_future(work())
            while not running.done():
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is None:
            return running.result()
        if not running.cancelled():
            running.exception()  # it was looked at
        raise cancelled

    async def tell(self, run: str, newest: int, max_lag: int | None) -> EngineState:
        """Remember how far the run is."""
        self._ledger.tell(run, newest, max_lag)
        return await self.state()

    async def load_adapter(self, name: str, target: Target) -> EngineState:
        """Refuse: a module has no adapters of its own.

        Raises:
            EngineRefusedError: Always.
        """
        raise self._error("lora", "unsupported", "a torch module takes whole versions only")

    async def unload_adapter(self, name: str, identity: Identity) -> EngineState:
        """Do nothing: there is none."""
        return await self.state()

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, given those before it."""

        def work() -> list[float]:
            with self.serving():
                return self._score(self._module, tokens)

        return await asyncio.to_thread(work)

    async def close(self) -> None:
        """Let go of the versions, once nothing is done with them; the module keeps its weights."""
        async with self._turn:
            for held in (self._staged, self._served):
                if held is not None:
                    held[1].close()
            self._staged = self._served = None

    # --- stage ------------------------------------------------------------------------------

    def _stage(self, target: Target) -> None:
        staged = self._staged
        if staged is not None and staged[0].identity == target.identity and not staged[1].changed():
            return
        self._drop_staged()
        try:
            checkpoint = Checkpoint(
                target.path, run=target.run, version=target.version, digest=target.digest
            )
            try:
                checkpoint.verify()
                tensors = self._load(self._module, checkpoint)
                checkpoint.require_unchanged("read")
                misfit = misfits(self._module, tensors)
                if misfit is not None:
                    raise self._error("check", "incompatible", misfit, target)
            except BaseException:
                checkpoint.close()
                raise
        except EngineRefusedError:
            raise
        except ShardcastError as error:
            raise self._error("stage", reason_of(error), error.message, target) from error
        target = replace(target, step=checkpoint.version.layout.step)  # as it was published
        self._staged = (target, checkpoint, tensors)
        self._ledger.stage(target)

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        self._ledger.staged = None
        if staged is not None:
            staged[1].close()

    # --- activate ---------------------------------------------------------------------------

    async def _activate(self, target: Target) -> Swapped:
        served = self._served
        if served is not None and served[0].identity == target.identity and not self._poisoned:
            return Swapped(0.0, {}, await self.state())
        await asyncio.to_thread(self._stage, target)
        self._ledger.at("pause", target)
        watch = Watch()
        try:
            await asyncio.to_thread(self._swap, target, watch)
        finally:
            self._ledger.activating = None
        return Swapped(watch.pause_ms, watch.phases_ms, await self.state())

    def _swap(self, target: Target, watch: Watch) -> None:
        """Copy between pause and resume; on a failure copy the old version back, or stay paused."""
        old, new = self._served, self._staged
        assert new is not None
        before = None if old is None or self._poisoned else old[0].identity
        if not self._gate.pause(self._lease_s):
            raise self._error(
                "pause",
                "timeout",
                f"forward passes go on for {self._lease_s:g} s; it serves the old version on",
                target,
            )
        watch.lap("pause")
        self._ledger.at("load", target)
        try:
            self._overwrite(new[2])
            new[1].require_unchanged("loaded")
        except Exception as error:
            watch.lap("load")
            self._give_back(target, old, error)
            watch.lap("restore")
            self._ledger.log(before, before, watch)
            raise self._error("load", "failed", f"it did not load: {error}", target) from error
        watch.lap("load")
        self._served, self._staged, self._poisoned = new, None, False
        if old is not None:
            old[1].close()
        self._gate.resume()
        watch.lap("resume")
        self._ledger.log(before, target.identity, watch)
        self._ledger.succeed(new[0])

    def _give_back(self, target: Target, old: _Held | None, error: Exception) -> None:
        self._drop_staged()
        failed: Exception = error
        if old is not None and not self._poisoned:
            try:
                self._load_again(old)
            except Exception as again:  # whatever it was, the weights are nobody's now
                failed = again
            else:
                self._gate.resume()
                return
        self._poisoned, self._served = True, None
        if old is not None:
            old[1].close()
        self._gate.resume()  # ``serving`` refuses from now on, which is better than to wait
        raise self._error(
            "load",
            "failed",
            f"it did not load ({error}), nor did what it had before ({failed}). Nobody knows which "
            "weights it has: the next activation loads a whole version",
            target,
        ) from error

    def _load_again(self, old: _Held) -> None:
        """Copy what was served before; where its files were changed, and are needed, verify them.

        Tensors in memory of their own need no file: what is under its name now is not asked.
        """
        target, checkpoint, tensors = old
        mapped = any(checkpoint.maps(tensor.data_ptr()) for tensor in tensors.values())
        if mapped and checkpoint.changed() is not None:
            checkpoint.verify_again()
            tensors = self._load(self._module, checkpoint)
            self._served = target, checkpoint, tensors  # those before may be of a damaged file
        self._overwrite(tensors)
        if mapped:
            checkpoint.require_unchanged("loaded again")

    def _overwrite(self, tensors: Tensors) -> None:
        import torch

        with torch.no_grad():
            for name, parameter in places_of(self._module):
                if name in tensors:
                    self._copy(parameter, tensors[name])

    def _error(
        self, phase: Phase, reason: str, message: str, target: Target | None = None
    ) -> EngineRefusedError:
        if target is not None:
            self._ledger.fail(phase, reason, message, target.version)
        return EngineRefusedError(
            f"engine {self.name}: {message}", source=self.name, phase=phase, reason=reason
        )


class Gate:
    """Lets many serve at once, or one change what they serve with. For threads."""

    def __init__(self) -> None:
        """Nobody is in."""
        self._changed = threading.Condition()
        self._inside = 0
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether nobody gets in."""
        return self._paused

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Be inside while the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def pause(self, seconds: float) -> bool:
        """Let nobody in and wait until all are out; False, and open again, if that takes too long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._paused = True
            left = self._changed.wait_for(
                lambda: self._inside == 0, timeout=max(deadline - time.monotonic(), 0)
            )
            if not left:
                self._paused = False
                self._changed.notify_all()
        return left

    def resume(self) -> None:
        """Let them in again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()


# --- tensors --------------------------------------------------------------------------------------


def named_tensors(module: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
    """Return a version's tensors as its files name them."""
    return dict(checkpoint.tensors())


def transformers_tensors(module: torch.nn.Module, checkpoint: Checkpoint) -> Tensors:
    """Return a version's tensors as transformers holds them once it has loaded the directory.

    The whole model is built a second time, in memory: it is for models that are saved under other
    names than they are held.
    """
    kind: Any = type(module)
    dtype = next(iter(module.parameters())).dtype
    shadow = kind.from_pretrained(str(checkpoint.directory), dtype=dtype, local_files_only=True)
    found: dict[str, torch.Tensor] = dict(shadow.state_dict())
    del shadow
    places = {name: memory_of(tensor) for name, tensor in found.items()}
    copies: dict[tuple[str, int, int], torch.Tensor] = {}
    for name, place in places.items():
        if place not in copies:  # what was saved as it is held is still the mapped file
            copies[place] = found[name].clone()
        found[name] = copies[place]
    return found


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    into.copy_(tensor)


# --- log-probabilities ----------------------------------------------------------------------------


def prompt_logprobs(module: torch.nn.Module, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it.

    For causal language models as transformers has them: called with ``input_ids`` they return
    ``logits``.
    """
    import torch

    device = next(iter(module.parameters())).device
    ids = torch.tensor([list(tokens)], device=device)
    with torch.no_grad():
        logits = module(input_ids=ids).logits[0, :-1].float()
        scores = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])
    found: list[float] = scores[:, 0].tolist()
    return found


def make_canary(
    module: torch.nn.Module, prompts: Sequence[Sequence[int]], tolerance: float
) -> Canary:
    """Return a canary of a model for ``publish --canary`` (``shardcast.canary.write_canary``)."""
    return Canary(
        prompts=[
            Prompt(
                tokens=list(prompt),
                logprobs=[min(one, 0.0) for one in prompt_logprobs(module, prompt)],
            )
            for prompt in prompts
        ],
        tolerance=tolerance,
    )
