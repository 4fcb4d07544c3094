"""What one rank of an engine does when it is told to: stage, activate, drop. Pure of torch and vLLM.

An activation ends in one of five ways, and every rank in the same one (``ranks``). Its steps:

1. *check*: is it staged, are the files still those that were hashed? All ranks say; if any says no,
   none touches its model: **refused**.
2. *load*: the whole reload, and a wipe of the KV memory where NaN may lie in it (``residue``). All
   ranks say how it went, and whether the files are still the same; if all are well, the new version
   is served from here on: **activated**.
3. *restore*: otherwise every rank loads what it served before from the files that it still holds; one
   that was poisoned wipes its KV memory as well. If that succeeds everywhere: **restored**, else
   **poisoned**.

While the model is being written to, the rank counts as poisoned; only the end of 2 or 3 clears it.
So an exception that nobody foresaw leaves it poisoned, never mislabelled.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.agreement import Agreement
from trainer_adapter.vllm.ranks import Command, Outcome, RankReply, Target
from trainer_adapter.vllm.residue import Residue
from trainer_adapter.vllm.verifying import Verifier, code_of

log = logging.getLogger("vllm.shardcast")

ADVICE = "activate a version again (every activation is a full load), or restart the engine"


class Weights(Protocol):
    """The model of a rank, as far as a swap goes."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Load all of a version, whatever state an earlier load has left the model in.

        Raises:
            Exception: At any point.
        """
        ...

    def gemm(self) -> dict[str, int]:
        """Return how many linear layers, and layers' experts, go through which kernel."""
        ...


class Rank:
    """One rank. Its methods are called from the thread that steps the engine."""

    def __init__(
        self,
        weights: Weights,
        verifier: Verifier,
        agreement: Agreement,
        residue: Residue,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve what the engine was booted with, whatever that is.

        Args:
            weights: The model.
            verifier: Stages versions.
            agreement: How this rank hears the others.
            residue: What lies in its KV memory.
            clock: Seconds.
        """
        self._weights = weights
        self._verifier = verifier
        self._agreement = agreement
        self._residue = residue
        self._clock = clock
        self._served: Target | None = None
        self._held: Checkpoint | None = None
        self._poisoned = ""

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self._agreement.size == 1

    def boot(self, target: Target, checkpoint: Checkpoint) -> None:
        """Note that the engine was booted with a version; the rank holds it from here on."""
        self._served, self._held = target, checkpoint
        self._residue.serves(target)

    def tell(self, command: Command) -> RankReply:
        """Do what a command says; never raises on purpose."""
        if command.op == "activate" and command.target is not None:
            return self.activate(command.target, keep=command.keep)
        if command.op == "stage" and command.target is not None:
            served = self._known()
            if served is None or served.identity != command.target.identity:
                self._verifier.begin(command.target)
        elif command.op == "drop":
            self._verifier.drop()
        elif command.target is None and command.op != "state":
            return self._reply("refused", "malformed", f"{command.op} needs a target")
        return self._reply()

    def wait(self) -> RankReply:
        """Wait until staging has ended; return what ``state`` would."""
        self._verifier.wait()
        return self._reply()

    def lost(self, why: str) -> None:
        """Take down that the weights are gone: somebody else had them thrown away."""
        self._poison(why)
        self._residue.lost()

    def close(self) -> None:
        """Give everything back."""
        self._verifier.drop()
        if self._held is not None:
            self._held.close()
            self._held = None

    # --- activation -------------------------------------------------------------------------

    def activate(self, target: Target, *, keep: bool = False) -> RankReply:
        """Load what is staged, as the module says.

        Args:
            target: The version.
            keep: Whether running requests go on with what lies in the KV memory.
        """
        phases: dict[str, float] = {}
        try:
            return self._activate(target, phases, keep=keep)
        except Exception as error:  # another rank is gone
            log.exception("activating version %d", target.version)
            self._poison(f"activating version {target.version} broke off: {_said(error)}")
            self._residue.lost()
            return self._reply("poisoned", "failed", self._poisoned, "load", phases)

    def _activate(self, target: Target, phases: dict[str, float], *, keep: bool) -> RankReply:
        with _Phase(phases, "check", self._clock):
            words = self._agreement.gather(self._opening_word(target, keep=keep))
        says = [json.loads(word) for word in words]
        if all(one["served"] for one in says):
            return self._reply("already", phases=phases)
        for number, one in enumerate(says):
            if one["problem"]:
                message = f"rank {number}: {one['problem']}"
                return self._reply("refused", one["code"], message, "check", phases)
        staged, checkpoint, ready = self._verifier.take()
        self._poison(f"loading version {target.version} was begun and has not ended")
        with _Phase(phases, "load", self._clock):
            problems = self._agreed(lambda: self._load_new(checkpoint, ready.load, phases))
        ready.close()
        if not any(problems):
            old, self._held = self._held, checkpoint
            self._served, self._poisoned = staged, ""
            self._residue.serves(staged)
            if old is not None:
                old.close()
            return self._reply("activated", phases=phases)
        checkpoint.close()
        return self._restore(target, _first(problems), phases)

    def _opening_word(self, target: Target, *, keep: bool) -> str:
        served = self._known()
        word: dict[str, Any] = {"served": False, "problem": "", "code": ""}
        if served is not None and served.identity == target.identity:
            word["served"] = True
        staged = self._verifier.staged()
        if staged is None or staged.identity != target.identity:
            has = "nothing" if staged is None else f"version {staged.version} ({staged.digest})"
            word["code"] = "unavailable"
            word["problem"] = (
                f"version {target.version} ({target.digest}) is not staged here, or its files "
                f"changed since; staged is {has}: stage it again"
            )
        elif not self._verifier.quiet():
            word["code"] = "unavailable"
            word["problem"] = "a version that was given up is still being compared with the model"
        elif refusal := self._residue.refusal(keep=keep):
            word["code"], word["problem"] = "refused", refusal
        return json.dumps(word)

    def _load_new(
        self, checkpoint: Checkpoint, load: Callable[[], None], phases: dict[str, float]
    ) -> None:
        self._load(checkpoint, load)
        wiping = _Phase(phases, "wipe", self._clock)
        with wiping:
            wiping.counts = self._residue.wipe()

    def _load(self, checkpoint: Checkpoint, load: Callable[[], None]) -> None:
        load()
        checkpoint.require_unchanged("loaded")

    def _restore(self, target: Target, why: str, phases: dict[str, float]) -> RankReply:
        """Load again what was served; every rank comes here, also those whose load went well."""
        message = f"loading version {target.version} failed: {why}"
        log.error("%s", message)
        with _Phase(phases, "restore", self._clock):
            problems = self._agreed(self._load_held)
        if not any(problems):
            self._poisoned = ""
            self._residue.goes_back_to(self._served)
            back = self._served.version if self._served is not None else None
            message = f"{message}; version {back} was loaded again"
            return self._reply("restored", "failed", message, "load", phases)
        self._poison(f"{message}; then {_first(problems)}")
        self._residue.lost()
        return self._reply("poisoned", "failed", self._poisoned, "load", phases)

    def _load_held(self) -> None:
        held = self._held
        if held is None:
            raise RuntimeError("what was served before was booted from elsewhere, and is not held")
        if held.changed() is not None:  # also where it could not be verified the last time
            held.verify_again()
        held.map_again()
        self._load(held, lambda: self._weights.load(held))
        self._residue.wipe_unknown()

    def _agreed(self, work: Callable[[], None]) -> list[str]:
        """Do it; return what became of it on every rank, empty where it went well."""
        word = ""
        try:
            work()
        except Exception as error:
            log.exception("rank %d", self._agreement.rank)
            word = _said(error)
        return self._agreement.gather(word)

    def _poison(self, why: str) -> None:
        self._poisoned = why if ADVICE in why else f"{why}: {ADVICE}"

    # --- what it says -----------------------------------------------------------------------

    def _known(self) -> Target | None:
        return None if self._poisoned else self._served

    def _reply(
        self,
        outcome: Outcome = "ok",
        code: str = "",
        message: str = "",
        phase: str = "",
        phases: dict[str, float] | None = None,
    ) -> RankReply:
        return RankReply(
            rank=self._agreement.rank,
            outcome=outcome,
            code=code,
            message=message,
            phase=phase,
            phases_ms=dict(phases or {}),
            served=self._known(),
            staged=self._verifier.staged(),
            staging=self._verifier.progress(),
            failed=self._verifier.failure(),
            poisoned=self._poisoned,
            suspect=self._residue.suspect,
            gemm=self._weights.gemm(),
        )


class _Phase:
    """Times a phase."""

    def __init__(self, phases: dict[str, float], name: str, clock: Callable[[], float]) -> None:
        self._phases, self._name, self._clock = phases, name, clock
        self._start = 0.0
        self.counts = True

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *exc: object) -> None:
        if self.counts:
            self._phases[self._name] = round((self._clock() - self._start) * 1000, 3)


def _said(error: Exception) -> str:
    text = str(error)
    return text if code_of(error) != "failed" and text else f"{type(error).__name__}: {text}"


def _first(problems: list[str]) -> str:
    return next(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
