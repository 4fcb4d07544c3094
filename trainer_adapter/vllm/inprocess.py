"""Swapping an engine that runs in your own program: ``LLM``, or ``AsyncLLM`` without a server.

::

    llm = LLM(model="OUT/current", load_format="shardcast", weight_transfer_config={"backend": "shardcast"})
    print(served(llm))                                 # which version that was; tokens carry its label
    for update in worker.iterate():                    # shardcast.worker.Worker(OUT, run, ...)
        swap(llm, target_of("policy", update))         # between two calls of generate
        outputs = llm.generate(...)

The files are verified, the model is checked to fit them, all ranks agree; where anything fails
before, the model is not touched, and where it fails later the old version is loaded again. Where
that fails as well, ``LLM`` takes no requests any more, and ``AsyncLLM`` stays paused, until a swap
succeeds.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec.structs import replace

import shardcast
from shardcast.engine.forms import (
    DEFAULT_LEASE_SECONDS,
    UNKNOWN_VERSION,
    ActivateAnswer,
    ActivateRequest,
    Requests,
    StageRequest,
    label_of,
)
from shardcast.errors import EngineError, EngineRefusedError, EngineUncertainError, ShardcastError
from trainer_adapter.vllm.client import VllmControl
from trainer_adapter.vllm.configured import refusal, settings_of
from trainer_adapter.vllm.control import SystemClock
from trainer_adapter.vllm.machine import Facts, SwapError
from trainer_adapter.vllm.ranks import (
    RPC,
    Report,
    Target,
    activate_command,
    combine,
    stage_command,
    state_command,
)
from trainer_adapter.vllm.serving import keep_refusal, unsupported
from trainer_adapter.vllm.staging import Staging
from trainer_adapter.vllm.swap import Swapper

_AGAIN: Final = "swap again (every swap is a full load), or restart the engine"


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

    While weights are loaded the label is ``unknown`` and ``generate`` raises. Both end when it is
    known which version is loaded, and not before: an interruption anywhere leaves them so.

    Args:
        llm: vLLM's ``LLM``, with the weight-transfer backend ``shardcast``.
        target: The version.
        sleep: Waits between two questions while the files are verified.

    Returns:
        What the ranks said: ``outcome`` ``activated`` or ``already``, how long what took.

    Raises:
        EngineRefusedError: If it was not taken over: what was served before still is.
        EngineError: If nobody knows which weights are loaded. ``generate`` raises it as well, until
            a ``swap`` succeeds (every one is a full load).
    """
    _require_swappable(llm)
    if llm.llm_engine.has_unfinished_requests():
        raise EngineRefusedError("requests are running", phase="pause", reason="busy")
    report = _stage(llm, target, sleep)
    if report.served is not None and report.served.identity == target.identity:
        _open(llm, report.served)
        return replace(report, outcome="already")
    _forget_caches(llm)
    before = llm.get_weight_version()
    name = f"version {target.version}"
    _shut(llm, f"{name} was being loaded, and nobody knows how that ended: {_AGAIN}")
    report = _tell(
        llm, activate_command(target), f"; nobody knows whether {name} is loaded: {_AGAIN}"
    )
    if report.outcome in ("activated", "already"):
        _open(llm, report.served or target)
        return report
    if report.poisoned or report.outcome == "poisoned":
        why = report.poisoned or report.message
        _shut(llm, why)
        raise EngineError(why)
    _open(llm, report.served, otherwise=before)
    raise EngineRefusedError(
        report.message, phase=report.phase or "load", reason=report.code or "failed"
    )


def served(llm: Any) -> Target | None:
    """Return which version an ``LLM`` runs, and label its tokens with it.

    None if it was booted from elsewhere and nothing was swapped since.

    Raises:
        EngineRefusedError: If this engine cannot swap; says how to start it.
        EngineError: If nobody knows which weights are loaded; ``generate`` raises it, too.
    """
    _require_swappable(llm)
    report = _tell(llm, state_command())
    if report.poisoned:
        _shut(llm, report.poisoned)
        raise EngineError(report.poisoned)
    if report.served is not None:
        _open(llm, report.served)
    return report.served


def _require_swappable(llm: Any) -> None:
    engine = llm.llm_engine
    settings = settings_of(engine.vllm_config, plugins=os.environ.get("VLLM_PLUGINS"))
    why = unsupported(settings)
    if why:
        raise EngineRefusedError(why, phase="check", reason="unsupported")
    if engine.is_sleeping():
        raise EngineRefusedError(
            "the engine is asleep: call wake_up() without tags first",
            phase="check",
            reason="refused",
        )


def _tell(llm: Any, command: dict[str, Any], meaning: str = "") -> Report:
    try:
        return combine(llm.collective_rpc(RPC, args=(command,)))
    except ShardcastError:
        raise
    except Exception as error:
        raise EngineUncertainError(f"the engine did not answer ({error}){meaning}") from error


def _stage(llm: Any, target: Target, sleep: Callable[[float], None]) -> Report:
    report = _tell(llm, stage_command(target))
    staging = Staging(target, time.monotonic())
    try:
        while not staging.over(report, time.monotonic()):
            sleep(staging.wait())
            report = _tell(llm, state_command())
    except SwapError as error:
        raise EngineRefusedError(error.message, phase="stage", reason=error.slug) from error
    return report


def _forget_caches(llm: Any) -> None:
    """Forget what was computed with the old weights: before the load, so that failing is harmless."""
    try:
        forgotten = llm.reset_prefix_cache(reset_connector=True)
        llm.llm_engine.reset_mm_cache()
        llm.llm_engine.reset_encoder_cache()
    except Exception as error:
        raise _kept_caches(f"resetting its caches failed ({error})") from error
    if not forgotten:
        raise _kept_caches("its prefix cache, or its KV connector's, cannot be reset now")


def _kept_caches(what: str) -> EngineRefusedError:
    return EngineRefusedError(
        f"{what}, and it would answer from what the old weights computed; nothing was loaded: end"
        " what uses the cache, then swap again",
        phase="pause",
        reason="refused",
    )


def _shut(llm: Any, why: str) -> None:
    """Take no requests, and label nothing with a version, until ``_open``."""

    def refuse(*args: object, **members: object) -> None:
        raise EngineError(why)

    llm.llm_engine.add_request = refuse  # on this object, before its class's
    llm.update_weight_version(UNKNOWN_VERSION)


def _open(llm: Any, version: Target | None, *, otherwise: str = UNKNOWN_VERSION) -> None:
    """Label what is loaded (``otherwise``, if that is no version), then take requests."""
    llm.update_weight_version(otherwise if version is None else label_of(version.identity))
    vars(llm.llm_engine).pop("add_request", None)


# --- AsyncLLM --------------------------------------------------------------------------------


async def attach(client: Any, *, salted: bool = False) -> Swapper:
    """Return what swaps an ``AsyncLLM`` (or any ``EngineClient``) while it generates; made once.

    ::

        swapper = await attach(engine)
        await swap_async(swapper, target_of("policy", update))      # requests go on around it
        print(swapper.state.served)

    Args:
        client: The engine, in the event loop that it was made in.
        salted: Whether every request that it is given has a ``cache_salt`` which is another one
            for each version. Without that, ``requests="keep"`` is refused.

    Raises:
        SwapError: If this engine cannot swap; says how to start it.
    """
    settings = settings_of(client.vllm_config, plugins=os.environ.get("VLLM_PLUGINS"))
    why = refusal(settings)
    if why:
        raise SwapError("unsupported", why, phase="boot")
    import vllm

    facts = Facts(
        engine_version=str(vllm.__version__),
        plugin_version=shardcast.__version__,
        keep_refusal=keep_refusal(settings, salting=salted),
        may_sleep=settings.may_sleep,
        start=secrets.token_hex(8),
    )
    control = VllmControl(client, may_sleep=settings.may_sleep)
    swapper = Swapper(control, facts, SystemClock())
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
        SwapError: If it was not taken over. ``swapper.state`` tells what is served; where it is
            not ``ready`` the engine is paused, ``why`` says what to do, and requests wait until a
            later activation succeeds.
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
