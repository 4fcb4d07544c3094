"""A KV memory that is three words: is there NaN in it, can that be seen, how often was it wiped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class FakeMemory:
    """``residue.Memory``. Whoever generates with weights that are no numbers sets ``nan``."""

    nan: bool = False
    visible: bool = True
    wiped: int = 0
    looks: int = 0
    fail: str = ""

    def wipe(self) -> None:
        if self.fail:
            raise RuntimeError(self.fail)
        self.nan = False
        self.wiped += 1

    def look(self, stopping: Callable[[], bool]) -> str | None:
        self.looks += 1
        if not self.visible:
            return None
        return "layer 3 has keys or values that are NaN or infinite" if self.nan else ""
