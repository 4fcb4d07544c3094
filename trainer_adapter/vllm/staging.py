"""Staging from the server's side: tell the ranks, then ask until all are done or one has failed."""

from __future__ import annotations

from typing import Final

from trainer_adapter.vllm.control import Clock, EngineControl
from trainer_adapter.vllm.machine import SwapError
from trainer_adapter.vllm.ranks import Report, Target, stage_command, state_command

POLL_SECONDS: Final = 0.02
"""An ask comes between two steps of the engine and costs it well under a millisecond."""
SLOWEST_POLL_SECONDS: Final = 0.5
STALL_SECONDS: Final = 120.0
"""Without a single step more for so long (a megabyte hashed, a tensor packed), a disk does not answer."""


def verdict(report: Report, target: Target) -> bool:
    """Say whether every rank holds the version, or runs it.

    Raises:
        SwapError: If a rank could not, or they have been told to stage another one since.
    """
    if any(
        has is not None and has.identity == target.identity
        for has in (report.staged, report.served)
    ):
        return True
    if report.failed is not None and report.failed.digest == target.digest:
        raise SwapError(report.failed.code, report.failed.message, phase="stage")
    if report.staging is None or report.staging.digest != target.digest:
        raise SwapError(
            "superseded",
            f"staging version {target.version} was given up, because another one was asked for",
            phase="stage",
        )
    return False


class Staging:
    """How one staging goes, for whoever asks in a loop. Pure."""

    def __init__(self, target: Target, now: float) -> None:
        self._target = target
        self._moved, self._at = now, (-1, -1)
        self._wait = POLL_SECONDS

    def over(self, report: Report, now: float) -> bool:
        """Say whether it is done.

        Args:
            report: What the ranks say.
            now: Monotonic seconds.

        Raises:
            SwapError: With the ranks' code, or ``unavailable`` where nothing moves any more.
        """
        if verdict(report, self._target):
            return True
        staging = report.staging
        at = (-1, -1) if staging is None else (staging.done, staging.steps)
        if at != self._at:
            self._moved, self._at = now, at
        elif now - self._moved > STALL_SECONDS:
            raise SwapError(
                "unavailable",
                f"staging {self._target.path} has stood still for {STALL_SECONDS:.0f} s",
                phase="stage",
            )
        return False

    def wait(self) -> float:
        """Return for how many seconds to wait before the next question; longer each time."""
        wait, self._wait = self._wait, min(2 * self._wait, SLOWEST_POLL_SECONDS)
        return wait


async def stage(control: EngineControl, clock: Clock, target: Target) -> Report:
    """Let every rank verify and hold a version.

    A cancellation leaves the ranks at it; whoever asks next finds it staged.

    Raises:
        SwapError: With the ranks' code: ``incompatible``, ``integrity``, ``unavailable``...
    """
    report = await control.tell(stage_command(target))
    staging = Staging(target, clock.monotonic())
    while not staging.over(report, clock.monotonic()):
        await clock.sleep(staging.wait())
        report = await control.tell(state_command())
    return report
