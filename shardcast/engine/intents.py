"""What an agent was about to do to an engine that has no lease of its own, on disk.

SGLang is paused, loaded and continued by three calls. An agent that is killed between them leaves
the engine paused, perhaps with half of a version's weights, and nobody can ask it. So the intent is
written down before the first call and removed after the last one; who finds it knows that only a full
activation helps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from shardcast.engine.forms import Identity
from shardcast.store.files import atomic_write, disk_errors


class Intents(Protocol):
    """Remembers one engine's activation while it is under way."""

    def begin(self, identity: Identity) -> None:
        """Remember that a version is about to be loaded."""
        ...

    def end(self) -> None:
        """Forget it: the engine serves one whole version again."""
        ...

    def pending(self) -> bool:
        """Say whether an activation began and did not end."""
        ...


class MemoryIntents:
    """For engines whose agent is not expected to outlive this process, and for tests."""

    def __init__(self) -> None:
        self._identity: Identity | None = None

    def begin(self, identity: Identity) -> None:
        """Remember that a version is about to be loaded."""
        self._identity = identity

    def end(self) -> None:
        """Forget it."""
        self._identity = None

    def pending(self) -> bool:
        """Say whether an activation began and did not end."""
        return self._identity is not None


class FileIntents:
    """A small file for each engine, in OUT's ``state/engines``."""

    def __init__(self, directory: Path, engine: str) -> None:
        """Look at nothing yet.

        Args:
            directory: Where the files are.
            engine: The engine's URL.
        """
        name = hashlib.sha256(engine.encode()).hexdigest()[:32]
        self._engine = engine
        self._path = directory / f"{name}.json"

    def begin(self, identity: Identity) -> None:
        """Remember that a version is about to be loaded, also if this machine goes down.

        Raises:
            DiskError: If the system refuses; nothing may be begun then.
        """
        with disk_errors(self._path, "writing"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"engine": self._engine, "activating": str(identity)}
        atomic_write(self._path, msgspec.json.encode(content))

    def end(self) -> None:
        """Forget it.

        Raises:
            DiskError: If the system refuses; the engine is activated once more then.
        """
        with disk_errors(self._path, "removing"), suppress(FileNotFoundError):
            self._path.unlink()

    def pending(self) -> bool:
        """Say whether an activation began and did not end."""
        return self._path.exists()


OpenIntents = Callable[[str], Intents]
"""Returns the intents of the engine of that URL."""
