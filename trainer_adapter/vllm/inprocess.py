"""Swapping an engine that runs in your own program: ``LLM``, or ``AsyncLLM`` without a server.

::

    llm = LLM(model="OUT/current", load_format="shardcast", weight_transfer_config={"backend": "shardcast"})
    print(served(llm))                                 # which version that was; tokens carry its label
    for update in worker.iterate():                    # shardcast.worker.Worker(OUT, run, ...)
        swap(llm, target_of("policy", update))         # between two calls of generate
        outputs = llm.generate(...)

The files are verified, the model is checked to fit them, all ranks agree; where anything fails
before, the model is not touched, and where it fails later the old version is loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import shardcast
from shardcast.engine.forms import (
    DEFAULT_LEASE_SECONDS,
    ActivateAnswer,
    ActivateRequest,
    Requests,
    StageRequest,
    label_of,
)
from shardcast.errors import EngineError, EngineRefusedError, EngineUncertainError
from trainer_adapter.vllm.client import VllmControl
from trainer_adapter.vllm.control import SystemClock
from trainer_adapter.vllm.machine import Facts
from trainer_adapter.vllm.ranks import (
    RPC,
    Report,
    Target,
    activate_command,
    combine,
    stage_command,
    state_command,
)
from trainer_adapter.vllm.swap import Swapper

_ASK_SECONDS: Final = 0.01


class Obtained(Protocol):
    """A version as ``shardcast.worker`` hands it out (``Update``)."""

    @property
    def version(self) -> int:
        """Its number."""
        ...

    @property
    def manifest(self) -> str:
        """Its identity."""
        ...

    @property
    def step(self) -> int | None:
        """Its training step."""
        ...

    @property
    def path(self) -> Path:
        """Its directory."""
        ...


def target_of(run: str, update: Obtained) -> Target:
    """Return what to swap to, from what a worker has obtained."""
    return Target(
        run=run,
        version=update.version,
        digest=update.manifest,
        path=str(update.path),
        step=update.step,
    )


def swap(llm: Any, target: Target, *, sleep: Callable[[float], None] = time.sleep) -> Report:
    """Let an ``LLM`` take a version over; between two calls of ``generate``.

    Args:
        llm: vLLM's ``LLM``, with the weight-transfer backend ``shardcast``.
        target: The version.
        sleep: Waits between two questions while the files are verified.

    Returns:
        What the ranks said: ``outcome`` ``activated`` or ``already``, how long what took.

    Raises:
        EngineRefusedError: If it was not taken over: what was served before still is.
        EngineError: If nobody knows which weights are loaded: swap again (a full load) or restart.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise EngineRefusedError("requests are running", phase="pause", reason="busy")
    _stage(lambda command: combine(llm.collective_rpc(RPC, args=(command,))), target, sleep)
    report = combine(llm.collective_rpc(RPC, args=(activate_command(target),)))
    if report.outcome == "already":
        return report
    if not (llm.reset_prefix_cache() and _reset_others(llm)):
        raise EngineUncertainError("the prefix cache could not be reset: it holds old values")
    raise_for(report)
    llm.update_weight_version(label_of(target.identity))
    return report


def served(llm: Any) -> Target | None:
    """Return which version an ``LLM`` runs, and label its tokens with it.

    None if it was booted from elsewhere and nothing was swapped since.

    Raises:
        EngineError: If nobody knows which weights are loaded.
    """
    report = combine(llm.collective_rpc(RPC, args=(state_command(),)))
    if report.poisoned:
        raise EngineError(report.poisoned)
    if report.served is not None:
        llm.update_weight_version(label_of(report.served.identity))
    return report.served


def _stage(
    tell: Callable[[dict[str, Any]], Report], target: Target, sleep: Callable[[float], None]
) -> None:
    report = tell(stage_command(target))
    while report.staging is not None:
        sleep(_ASK_SECONDS)
        report = tell(state_command())
    if report.failed is not None:
        raise EngineRefusedError(report.failed.message, phase="stage", reason=report.failed.code)


def _reset_others(llm: Any) -> bool:
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
    return True


def raise_for(report: Report) -> None:
    """Raise what an activation's report says.

    Raises:
        EngineRefusedError: After ``refused`` and ``restored``.
        EngineError: After ``poisoned``.
    """
    if report.outcome in ("refused", "restored"):
        raise EngineRefusedError(report.message, phase=report.phase, reason=report.code)
    if report.outcome == "poisoned":
        raise EngineError(report.message)


# --- AsyncLLM --------------------------------------------------------------------------------


async def attach(client: Any) -> Swapper:
    """Return what swaps an ``AsyncLLM`` (or any ``EngineClient``) while it generates; made once.

    ::

        swapper = await attach(engine)
        await swap_async(swapper, target_of("policy", update))      # requests go on around it
        print(swapper.state.served)

    Raises:
        SwapError: If the engine was not started with the weight-transfer backend ``shardcast``.
    """
    import vllm

    facts = Facts(engine_version=str(vllm.__version__), plugin_version=shardcast.__version__)
    swapper = Swapper(VllmControl(client), facts, SystemClock())
    try:
        await swapper.boot()
    except BaseException:
        await swapper.close()
        raise
    return swapper


async def swap_async(
    swapper: Swapper,
    target: Target,
    *,
    requests: Requests = "recompute",
    lease_s: float = DEFAULT_LEASE_SECONDS,
) -> ActivateAnswer:
    """Let the engine take a version over: stage while it generates, then pause, load, resume.

    A cancellation stops neither; ``swapper.state`` tells what became of it.

    Args:
        swapper: Of ``attach``.
        target: The version.
        requests: What becomes of running requests.
        lease_s: How long the whole may take before the engine counts as not ready.

    Raises:
        SwapError: If it was not taken over; ``swapper.state`` tells what is served.
    """
    stage = StageRequest(
        run=target.run,
        version=target.version,
        digest=target.digest,
        path=target.path,
        step=target.step,
    )
    await swapper.stage(stage)
    return await swapper.activate(
        ActivateRequest(
            run=target.run,
            version=target.version,
            digest=target.digest,
            path=target.path,
            step=target.step,
            requests=requests,
            lease_s=lease_s,
        )
    )
