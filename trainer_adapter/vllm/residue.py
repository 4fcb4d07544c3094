"""What weights that are no numbers leave behind in a rank's KV memory, and when to wipe it. Pure.

NaN in the memory reaches the answers of later weights (``kv_memory``). Zeroing all of it takes about
as long as loading as many bytes, so it is done only where NaN may lie there:

- weights that were not all finite have been served: known from staging, or from the boot;
- nobody knows what was served, because the rank was poisoned: then going back to the old version wipes
  it as well, after which there need be no other load;
- the last layers' keys and values hold NaN or infinities: finite weights that overflow, or those of an
  engine that was booted from elsewhere. The staging thread looks, while the engine serves. What such an
  engine was booted with was never looked at: then the pause looks as well, or, where the memory cannot
  be seen (GPUs), wipes it without a look.

Requests that keep their cache need what is there: then nothing may be wiped, so it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.ranks import Target
from trainer_adapter.vllm.verifying import Prepare, Ready

log = logging.getLogger("vllm.shardcast")


class Memory(Protocol):
    """The KV memory of a rank."""

    def wipe(self) -> None:
        """Fill it with zeros.

        Raises:
            Exception: If the device refuses.
        """
        ...

    def look(self, stopping: Callable[[], bool]) -> str | None:
        """Return where NaN or an infinity lies; empty: nowhere; None: it cannot be seen."""
        ...


class Residue:
    """What a rank knows of its KV memory."""

    def __init__(self, memory: Memory) -> None:
        """Know nothing of what the engine was booted with."""
        self._memory = memory
        self._known = False
        self._lost = False
        self._why = ""
        self._seen = ""

    @property
    def suspect(self) -> str:
        """Why NaN may lie there, so that the next load wipes it; empty where it need not."""
        return self._why or self._seen

    def serves(self, target: Target) -> None:
        """Take down which weights are served from here on, in a memory that is clean."""
        self._known, self._lost, self._seen = True, False, ""
        self._why = f"version {target.version} is served: {target.nonfinite}"
        if not target.nonfinite:
            self._why = ""

    def lost(self) -> None:
        """Take down that nobody knows which weights are loaded."""
        self._lost = True
        self._why = self._why or "nobody knew which weights were loaded"

    def goes_back_to(self, target: Target | None) -> None:
        """Take down that what was served before was loaded again, after ``wipe_unknown``."""
        if self._lost and target is not None:
            self.serves(target)

    def preparing(self, prepare: Prepare) -> Prepare:
        """Return ``prepare``, which looks at the memory first, in the staging thread."""

        def look_and_prepare(checkpoint: Checkpoint, stopping: Callable[[], bool]) -> Ready:
            if not self.suspect:
                self._seen = self._look(stopping) or ""
            return prepare(checkpoint, stopping)

        return look_and_prepare

    def refusal(self, *, keep: bool) -> str:
        """Say why a load must not begin, in the pause; empty where it may.

        Args:
            keep: Whether running requests go on with what is there.
        """
        if not self._known and not self.suspect:
            found = self._look(lambda: False)
            if found is None and not keep:
                found = "it was never looked at what the engine was booted with"
            self._seen = found or ""
        if not keep or not self.suspect:
            return ""
        return (
            f"the KV memory may hold NaN ({self.suspect}) and must be wiped, so running requests "
            "cannot keep what they have there: activate with requests: recompute"
        )

    def _look(self, stopping: Callable[[], bool]) -> str | None:
        try:
            return self._memory.look(stopping)
        except Exception:  # it decides about a wipe, not about a swap
            log.exception("looking at the KV memory")
            return None

    def wipe(self) -> bool:
        """Wipe the memory if NaN may lie there; say whether it was.

        It stays suspect until ``serves``: only then it is known that the load was well everywhere.

        Raises:
            Exception: If the device refuses.
        """
        if not self.suspect:
            return False
        log.warning("wiping the KV memory: %s", self.suspect)
        self._memory.wipe()
        return True

    def wipe_unknown(self) -> None:
        """Wipe the memory if nobody knows with which weights it was filled.

        Raises:
            Exception: If the device refuses.
        """
        if self._lost:
            self.wipe()
