"""Who may change a store: one process at a time, also while a relay is replaced by the next one.

A relay that writes (fills, uploads, eviction, commits) holds the lock ``{store}/.relay.lock``, which
the kernel releases when its process ends, however it ends. A relay without the lock serves what
the disk holds and changes nothing that another process may be writing. docs/adr/0011 has the
reasons.

An origin's store is its publisher's: what is removed there, nobody can fetch again. So an origin holds
``{store}/.origin.lock`` together with other origins, and a relay below parents, which evicts by
its own ``--keep`` and ``--quota``, does not start there. What a store is while nobody runs, it
remembers itself (``shardcast.store.roles``).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from relay.threads import in_thread
from shardcast.errors import BusyError, DiskError, UsageError
from shardcast.store.files import disk_errors
from shardcast.store.locks import FileLock, try_lock
from shardcast.store.roles import ORIGIN_LOCK, RELAY_LOCK
from shardcast.store.store import Store

log = logging.getLogger("relay.keeping")

POLL_S = 0.02
"""Between two tries: flock has no wait with a deadline, and a waiting thread cannot be cancelled."""


class Keeping(enum.Enum):
    """How this process stands to the store."""

    WAITING = "waiting"
    HELD = "held"
    GIVEN_UP = "given up"


class Keeper:
    """The right to change a store. Used on the event loop.

    Attributes:
        state: Whether this process has it, hopes for it, or had it.
    """

    def __init__(
        self, store: Store, *, needed: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take nothing yet.

        Args:
            store: The store.
            needed: False for a relay that only reads: an origin without uploads, whose publishers
                have locks of their own. It counts as held.
            clock: Monotonic seconds.
        """
        self.state = Keeping.WAITING if needed else Keeping.HELD
        self._clock = clock
        self._lock = FileLock(store.root / RELAY_LOCK, what=f"store {store.root}")
        self._needed = needed
        self._settled = asyncio.Event()
        if not needed:
            self._settled.set()

    @property
    def held(self) -> bool:
        """Whether this process may change the store now."""
        return self.state is Keeping.HELD

    async def acquire(
        self, wait_s: float, look: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Take the lock. After a cancellation ``give_up`` gives back what may have been taken.

        A store that cannot be locked at all (a read-only file system) is not waited for: whatever
        is written there fails by itself.

        Args:
            wait_s: How long to wait for it.
            look: Called with the lock taken, before it counts as held: looks at what another
                process has left in the store.

        Raises:
            BusyError: If another process has it for longer than ``wait_s``; names that process.
        """
        deadline, told = self._clock() + wait_s, False
        while self.state is Keeping.WAITING:
            try:
                if not self._lock.held:  # it is after a look that failed
                    await in_thread(self._lock.acquire)
            except BusyError as error:
                if self._clock() >= deadline:
                    raise
                if not told:
                    log.info("waiting until this may be changed: %s", error.message)
                    told = True
                await asyncio.sleep(POLL_S)
                continue
            except DiskError as error:
                log.warning("the store cannot be locked against a second relay: %s", error)
            if look is not None:
                await look()
            self.state = Keeping.HELD
            self._settled.set()

    async def hoped(self, seconds: float) -> bool:
        """Wait for the lock if this process is about to get it; return whether it has it."""
        if self.state is Keeping.WAITING:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._settled.wait()
        return self.held

    def give_up(self) -> None:
        """Give the lock back, for good."""
        if self._needed:
            self.state = Keeping.GIVEN_UP
            self._settled.set()
        self._lock.release()


class OriginMark:
    """Tells relays below parents that an origin serves a store. All of it is blocking."""

    def __init__(self, root: Path) -> None:
        """Show nothing yet.

        Args:
            root: The store.
        """
        self._path = root / ORIGIN_LOCK
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process shows it."""
        return self._fd is not None

    def show(self) -> None:
        """Hold the mark, beside other origins, until ``hide`` or the end of the process.

        Where it cannot be held (a read-only file system) nothing can be evicted either.
        """
        if self._fd is not None:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            log.debug("the store is not marked as an origin's: %s", error)
            return
        if not try_lock(fd, exclusive=False):  # somebody looks at it just now
            os.close(fd)
            return
        self._fd = fd
        with contextlib.suppress(OSError):  # the pid is a help for people, not the lock
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)

    def hide(self) -> None:
        """Let go of it; harmless if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def require_absent(self) -> None:
        """Check that no origin serves the store.

        Raises:
            UsageError: If one does; names its process. Waiting for its end would not help.
            DiskError: If that cannot be found out.
        """
        with disk_errors(self._path, "opening"):
            try:
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return
        try:
            if not try_lock(fd, exclusive=True):
                holder = "another process"
                with contextlib.suppress(OSError, ValueError):
                    holder = f"process {int(os.pread(fd, 32, 0))}"
                raise UsageError(
                    f"store {self._path.parent} is an origin's, served by {holder}: a relay "
                    "below parents would remove versions there that nobody else has; give another "
                    "--store",
                    source=str(self._path),
                )
        finally:
            os.close(fd)
