"""Versions that engines serve or have staged: leased, so that nothing evicts or overwrites them.

A lease is a shared lock on the version's directory, as everybody's who reads there
(``shardcast.store.locks``); retention takes it exclusively and goes on where it cannot.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from shardcast.engine.driver import Target
from shardcast.engine.forms import Identity
from shardcast.errors import DiskError, ShardcastError
from shardcast.store.files import disk_errors, is_there
from shardcast.store.locks import try_lock
from shardcast.store.run import RunStore


class Leases:
    """Holds the versions that one agent's engines need. For one thread.

    Attributes:
        targets: What is held, by digest.
    """

    def __init__(
        self, store: RunStore, refused: Callable[[Identity, DiskError], None] = lambda *_: None
    ) -> None:
        """Hold nothing yet.

        Args:
            store: OUT; only looked at.
            refused: Told when the system refuses something about a version (out of descriptors, an
                I/O error): once for each reason, until that version is held or given up.
        """
        self._store = store
        self._refused = refused
        self._told: set[tuple[str, str]] = set()
        self._fds: dict[str, int] = {}
        self._targets: dict[str, Target] = {}
        self.targets: Mapping[str, Target] = MappingProxyType(self._targets)

    def hold(self, target: Target) -> bool:
        """Lease a version; False if it is not there any more, just being evicted, or the system refuses.

        What is leased and has another directory now (it was repaired) is leased anew.
        """
        held = self._fds.get(target.digest)
        if held is not None and os.fstat(held).st_nlink:
            return True
        if held is not None:
            os.close(self._fds.pop(target.digest))
            del self._targets[target.digest]
        try:
            fd = _lock(target)
        except DiskError as error:
            self.refuse(target.identity, error)
            return False
        if fd is None:
            return False
        self._fds[target.digest], self._targets[target.digest] = fd, target
        self._told = {told for told in self._told if told[0] != target.digest}
        return True

    def find(self, identity: Identity) -> Target | None:
        """Lease the version of that name if it is on this disk; return it."""
        held = self._targets.get(identity.digest)
        if held is not None or identity.run != self._store.run:
            return held
        directory = self._store.version_directory(identity.version)
        try:
            if not is_there(directory, stat.S_ISDIR):
                return None
            version = self._store.load_state(identity.version)
        except DiskError as error:
            self.refuse(identity, error)
            return None
        except ShardcastError:  # its documents contradict each other: not that version
            return None
        if version is None or version.manifest != identity.digest:
            return None
        target = Target(
            run=identity.run,
            version=identity.version,
            digest=identity.digest,
            path=directory.absolute(),
            step=version.layout.step,
        )
        return target if self.hold(target) else None

    def is_refused(self, digest: str) -> bool:
        """Say whether the system refused something about a version that is still needed and not held."""
        return digest not in self._fds and any(told[0] == digest for told in self._told)

    def refuse(self, identity: Identity, error: DiskError) -> None:
        """Tell that the system refuses something about a version, if that is news."""
        told = (identity.digest, error.message)
        if told not in self._told:
            self._told.add(told)
            self._refused(identity, error)

    def keep(self, digests: Collection[str]) -> None:
        """Give every other version's lease back."""
        for digest in [one for one in self._fds if one not in digests]:
            os.close(self._fds.pop(digest))
            del self._targets[digest]
        self._told = {told for told in self._told if told[0] in digests}

    def close(self) -> None:
        """Give every lease back."""
        self.keep(())


def _lock(target: Target) -> int | None:
    with disk_errors(target.path, "opening"):
        try:
            fd = os.open(target.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
    locked = False
    try:
        with disk_errors(target.path, "locking"):
            locked = try_lock(fd, exclusive=False)
    finally:
        if not locked:  # it is being evicted
            os.close(fd)
    return fd if locked else None
