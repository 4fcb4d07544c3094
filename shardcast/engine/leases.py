"""Versions that engines serve or have staged: leased, so that nothing evicts or overwrites them.

A lease is a shared lock on the version's directory, as everybody's who reads there
(``shardcast.store.locks``); retention takes it exclusively and goes on where it cannot.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import MappingProxyType

from shardcast.engine.driver import Target
from shardcast.engine.forms import Identity
from shardcast.errors import BusyError, DiskError, ShardcastError
from shardcast.store.files import disk_errors
from shardcast.store.locks import try_lock
from shardcast.store.run import RunStore


class Leases:
    """Holds the versions that one agent's engines need. For one thread.

    Attributes:
        targets: What is held, by digest.
    """

    def __init__(self, store: RunStore) -> None:
        """Hold nothing yet.

        Args:
            store: OUT; only looked at.
        """
        self._store = store
        self._fds: dict[str, int] = {}
        self._targets: dict[str, Target] = {}
        self.targets: Mapping[str, Target] = MappingProxyType(self._targets)

    def hold(self, target: Target) -> bool:
        """Lease a version; False if it is not there any more, or just being evicted.

        What is leased and has another directory now (it was repaired) is leased anew.
        """
        held = self._fds.get(target.digest)
        if held is not None and os.fstat(held).st_nlink:
            return True
        if held is not None:
            os.close(self._fds.pop(target.digest))
            del self._targets[target.digest]
        with suppress(DiskError, BusyError):
            self._fds[target.digest] = _lock(target)
            self._targets[target.digest] = target
            return True
        return False

    def find(self, identity: Identity) -> Target | None:
        """Lease the version of that name if it is on this disk; return it."""
        held = self._targets.get(identity.digest)
        if held is not None or identity.run != self._store.run:
            return held
        directory = self._store.version_directory(identity.version)
        if not directory.is_dir():
            return None
        with suppress(ShardcastError):
            version = self._store.load_state(identity.version)
            if version is not None and version.manifest == identity.digest:
                target = Target(
                    run=identity.run,
                    version=identity.version,
                    digest=identity.digest,
                    path=directory.absolute(),
                    step=version.layout.step,
                )
                return target if self.hold(target) else None
        return None

    def keep(self, digests: Collection[str]) -> None:
        """Give every other version's lease back."""
        for digest in [one for one in self._fds if one not in digests]:
            os.close(self._fds.pop(digest))
            del self._targets[digest]

    def close(self) -> None:
        """Give every lease back."""
        self.keep(())


def _lock(target: Target) -> int:
    with disk_errors(target.path, "opening"):
        fd = os.open(target.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not try_lock(fd, exclusive=False):
        os.close(fd)
        raise BusyError("the version is being evicted", source=str(target.path))
    return fd
