"""Whose a store is: an origin's, which its publishers write to, or a relay's below parents.

What is removed from an origin's store, nobody can fetch again; what is published into a relay's,
nobody hears of. So a store remembers its role in ``{store}/.role``, whoever runs at the moment, and
takes another one only where a person says so (``--take-over``). docs/adr/0011 has the reasons.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardcast.errors import BusyError, DiskError, StateError, UsageError
from shardcast.store.files import atomic_write, disk_errors
from shardcast.store.locks import FileLock

log = logging.getLogger("shardcast.store")

RELAY_LOCK: Final = ".relay.lock"
"""Held by the relay that changes the store."""
ORIGIN_LOCK: Final = ".origin.lock"
"""Held by the origins that serve the store; made by no relay below parents."""
_ROLE: Final = ".role"
_MARKING_S: Final = 10.0


class Role(enum.StrEnum):
    """Whose a store is."""

    ORIGIN = "origin"
    RELAY = "relay"


def role_of(root: Path) -> Role | None:
    """Return whose a store is; None where nobody has said so yet.

    One without a mark was an origin's if an origin has served it.

    Raises:
        StateError: If the mark cannot be understood.
        DiskError: If it cannot be read.
    """
    path = root / _ROLE
    with disk_errors(path, "reading"):
        try:
            text = path.read_bytes().decode("ascii", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return Role.ORIGIN if os.path.exists(root / ORIGIN_LOCK) else None
    try:
        return Role(text)
    except ValueError as error:
        raise StateError(
            "the mark of whose store this is, an origin's or a relay's, is damaged: start what "
            "uses it with --take-over, which writes it anew",
            source=str(path),
        ) from error


def require_role(root: Path, role: Role, *, take_over: bool = False) -> None:
    """Check that a store may be used in a role; change nothing.

    Raises:
        UsageError: If it has the other role, and this is no deliberate change.
        StateError, DiskError: As ``role_of``.
    """
    if take_over or role_of(root) in (None, role):
        return
    raise UsageError(_REFUSALS[role].format(root=root), source=str(root))


def claim_role(root: Path, role: Role, *, take_over: bool = False) -> None:
    """Mark a store, which has no other role or is taken over.

    Raises:
        UsageError: As ``require_role``; also if another process marks it and does not end.
        StateError, DiskError: As ``role_of``, or if the mark cannot be written.
    """
    require_role(root, role, take_over=take_over)
    if not take_over and os.path.lexists(root / _ROLE):
        return
    with _marking(root):
        require_role(root, role, take_over=take_over)  # somebody else may have been faster
        atomic_write(root / _ROLE, _text(role))


def claim_for_publishing(root: Path, *, take_over: bool = False) -> None:
    """Mark a store as an origin's, before something is published into it.

    Raises:
        UsageError: If it is a relay's. With ``take_over`` only if a relay runs there.
        StateError, DiskError: As ``claim_role``.
    """
    if not take_over:
        claim_role(root, Role.ORIGIN)
        return
    lock = FileLock(root / RELAY_LOCK, what=f"store {root}")
    try:
        known = role_of(root)
    except StateError:
        known = None
    if known is not Role.ORIGIN:  # an origin that accepts uploads holds the same lock, and may
        try:
            lock.acquire()
        except BusyError as error:
            raise UsageError(
                f"{error.message}, a relay: end it first, or it goes on evicting here",
                source=str(root),
            ) from error
    try:
        claim_role(root, Role.ORIGIN, take_over=True)
    finally:
        lock.release()


def claim_if_writable(root: Path, role: Role, *, take_over: bool) -> None:
    """Mark a store as ``claim_role``; where nothing can be written, nothing can be evicted either.

    Raises:
        UsageError, StateError: As ``claim_role``.
    """
    try:
        claim_role(root, role, take_over=take_over)
    except StateError:
        raise
    except DiskError as error:
        log.warning("whose store this is cannot be noted: %s", error)


_REFUSALS: Final = {
    Role.ORIGIN: (
        "store {root} is a relay's: nobody would hear of what is published there; give another "
        "--store (the origin's), or --take-over to make this one an origin's"
    ),
    Role.RELAY: (
        "store {root} is an origin's: a relay below parents would remove versions there that "
        "nobody else has; give another --store, or --take-over to make this one a relay's"
    ),
}


def _text(role: Role) -> bytes:
    return f"{role}\n".encode("ascii")


@contextlib.contextmanager
def _marking(root: Path) -> Iterator[None]:
    lock = FileLock(root / f"{_ROLE}.lock", what=f"the mark of store {root}")
    lock.acquire(wait_s=_MARKING_S)
    try:
        yield
    finally:
        lock.release()
