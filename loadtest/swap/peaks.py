"""The most memory that process trees had within a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from loadtest import measure

_EVERY_S: Final = 0.02
_FIELDS: Final = {"Pss:": "pss", "Pss_Anon:": "pss_anonymous"}


class Peaks:
    """What was seen.

    Attributes:
        before: Proportional set size (each shared page divided by those who share it) at first.
        most: The most at one moment: ``pss``, and ``pss_anonymous``, which no file backs.
        resident: Sum of the kernel's high-water marks of the resident sets (no peak is missed, shared
            pages count for each).
    """

    def __init__(self) -> None:
        self.before: dict[str, dict[str, int]] = {}
        self.most: dict[str, dict[str, int]] = {}
        self.resident: dict[str, int] = {}

    def see(self, name: str, now: dict[str, int]) -> None:
        self.before.setdefault(name, now)
        most = self.most.setdefault(name, dict(now))
        for field, value in now.items():
            most[field] = max(most[field], value)


@contextlib.contextmanager
def peaks(roots: Mapping[str, int]) -> Iterator[Peaks]:
    """Watch process trees, named, by the id of their root, while the block runs.

    Reading it takes a process's memory map for milliseconds: not while pauses are measured.
    """
    seen, over = Peaks(), threading.Event()
    members = {name: measure.tree(pid) for name, pid in roots.items()}
    for pid in (pid for pids in members.values() for pid in pids):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark starts anew

    def look() -> None:
        while True:
            for name, pids in members.items():
                seen.see(name, _now(pids))
            if over.wait(_EVERY_S):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        for name, pids in members.items():
            seen.resident[name] = sum(measure.peak_resident_bytes(pid) for pid in pids)


def _now(pids: list[int]) -> dict[str, int]:
    found = dict.fromkeys(_FIELDS.values(), 0)
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                words = line.split()
                if words[0] in _FIELDS:
                    found[_FIELDS[words[0]]] += int(words[1]) * 1024
    return found
