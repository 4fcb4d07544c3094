"""What a worker is told, checked before anything is opened."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shardcast.config import NetConfig
from shardcast.errors import MalformedError, UsageError
from shardcast.hooks import UpdateHook
from shardcast.protocol.documents import check_run
from shardcast.store.stored import Durability


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Everything a worker is told. Immutable.

    Attributes:
        out: The run's directory on this machine.
        run: The run.
        sources: Base URLs.
        keys: Pinned raw public keys.
        first_use: Trust the first head's keys where none is known.
        accept_expired: Take versions of an expired head.
        durability: What a commit waits for.
        keep: Committed versions that are kept, at least 1.
        on_update: Run after each commit.
        config: Network bounds.
        tls: For https; None means the system's certificates.
        deadline_s: A single pull fails after so long, whatever it waits for; None: never by that.
        threads: For local hashing and copying; None means all cores.
        recycle: A follower overwrites files of evicted versions that nobody can read any more.
            False where a program outside sends them with ``sendfile``.
    """

    out: Path
    run: str
    sources: tuple[str, ...]
    keys: tuple[bytes, ...] = ()
    first_use: bool = False
    accept_expired: bool = False
    durability: Durability = Durability.SYNC
    keep: int = 2
    on_update: UpdateHook | None = None
    config: NetConfig = field(default_factory=NetConfig)
    tls: ssl.SSLContext | None = None
    deadline_s: float | None = None
    threads: int | None = None
    recycle: bool = True

    def __post_init__(self) -> None:
        """Check what can be wrong before anything is opened.

        Raises:
            UsageError: Naming it.
        """
        try:
            check_run(self.run)
        except MalformedError as error:
            raise UsageError(error.message) from error
        if not self.sources:
            raise UsageError("a worker needs at least one source (--from URL)")
        if self.keep < 1:
            raise UsageError(f"keep is at least 1, not {self.keep}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise UsageError(f"a deadline is above zero, not {self.deadline_s:g} s")
