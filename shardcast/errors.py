"""Every exception Shardcast raises on purpose, grouped by who must act.

The exit codes are those of the command line (docs/PROTOCOL.md, "Exit codes"). Third-party
exceptions are translated into these where they can occur; nothing else leaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar


class ShardcastError(Exception):
    """Base of all errors. Says what, which and where.

    Attributes:
        message: One sentence for a person.
        source: The URL, path or key the message is about, or None.
        code: Stable machine-readable slug of the error's class.
        exit_code: What the command line exits with.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, source: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.source = source

    def __str__(self) -> str:
        if self.source and self.source not in self.message:
            return f"{self.message} ({self.source})"
        return self.message


def said_of(place: str, error: ShardcastError) -> str:
    """Return an error's message after the name of what it is about, which is said once."""
    text = error.message.replace(f" from {place}:", ":", 1)
    return error.message if place in text else f"{place}: {text}"


@contextlib.contextmanager
def about(source: str) -> Iterator[None]:
    """Let whatever error ends the block say where its bytes came from, unless it does already.

    For the pure code of ``shardcast.protocol``, which knows bytes and no places.
    """
    try:
        yield
    except ShardcastError as error:
        error.source = error.source or source
        raise


# --- the person at the keyboard -------------------------------------------------------------


class UsageError(ShardcastError):
    """The command, option, key file or configuration is wrong: the caller must change it."""

    code = "usage"
    exit_code = 2


class BusyError(UsageError):
    """Another process holds the lock that this operation needs."""

    code = "busy"


class NotFoundError(UsageError):
    """The run, version or directory that was asked for does not exist."""

    code = "not_found"


# --- whoever wrote the bytes ----------------------------------------------------------------


class MalformedError(ShardcastError):
    """A document, header or state file is not what its format says: its writer must act."""

    code = "malformed"
    exit_code = 10


class UnsafePathError(MalformedError):
    """A layout names a path that must not be written."""

    code = "unsafe_path"


class NonFiniteError(MalformedError):
    """A tensor holds NaN or an infinity, and whoever publishes said that none may."""

    code = "nonfinite"


class LimitError(MalformedError):
    """A declared or received size or count is above its limit."""

    code = "limit"


# --- whoever holds or carries the bytes -----------------------------------------------------


class IntegrityError(ShardcastError):
    """Bytes do not have the digest that names them: the source or the disk is bad."""

    code = "integrity"
    exit_code = 11


class ModifiedError(IntegrityError):
    """A file changed while it was published, or after it was published under a link."""

    code = "modified"


# --- whoever signs --------------------------------------------------------------------------


class TrustError(ShardcastError):
    """A head or document is not accepted. The subclasses name the attack they stop."""

    code = "trust"
    exit_code = 12


class UnknownKeyError(TrustError):
    """No signature by a key that is trusted for this run."""

    code = "unknown_key"


class BadSignatureError(TrustError):
    """A signature that claims a trusted key does not verify."""

    code = "bad_signature"


class RollbackError(TrustError):
    """A head older than one that was already accepted."""

    code = "rollback"


class EquivocationError(TrustError):
    """Two different signed statements where only one can be true."""

    code = "equivocation"


class WrongRunError(TrustError):
    """A head or layout of another run."""

    code = "wrong_run"


class MixAndMatchError(TrustError):
    """Documents that are valid alone but do not belong together."""

    code = "mix_and_match"


class ExpiredError(TrustError):
    """The head has expired (freeze) and the caller did not say that this is fine."""

    code = "expired"


class ClockError(TrustError):
    """The head lies in the future: this machine's clock or the publisher's is wrong."""

    code = "clock"


class WithdrawnError(TrustError):
    """The version was withdrawn by its publisher."""

    code = "withdrawn"


# --- the network ----------------------------------------------------------------------------


class NetworkError(ShardcastError):
    """A source cannot be reached, answers wrongly or is too slow."""

    code = "network"
    exit_code = 13


class GoneError(NetworkError):
    """No source has a version any more, and the head lists it no longer."""


class WrongAnswerError(NetworkError):
    """A source answers, but with something else than the blob that it was asked for."""


class SourceStatusError(NetworkError):
    """A source answered with an HTTP status other than the one needed.

    Attributes:
        status: The HTTP status.
        retry_after: Seconds the source asked for, or None.
    """

    code = "http_status"

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        status: int,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, source=source)
        self.status = status
        self.retry_after = retry_after


class StallError(NetworkError):
    """A source sent less than the minimum rate, or nothing before a deadline."""

    code = "stall"


class RefusedError(NetworkError):
    """A remote origin refused to take a version (token, condition or content)."""

    code = "refused"


# --- this machine's disk --------------------------------------------------------------------


class DiskError(ShardcastError):
    """The file system said no: full, read-only, quota, I/O error."""

    code = "disk"
    exit_code = 14


class DiskFullError(DiskError):
    """Not enough space for what must be written."""

    code = "disk_full"


class StateError(DiskError):
    """Saved state is damaged in a way that cannot be repaired by fetching again."""

    code = "state"


# --- the inference engine -------------------------------------------------------------------


class EngineError(ShardcastError):
    """An engine or an update hook failed."""

    code = "engine"
    exit_code = 15


class EngineRefusedError(EngineError):
    """An engine answered that it cannot, or could not, do what it was told.

    Attributes:
        phase: Where it failed (``shardcast.engine.forms.Phase``), or the request's name.
        reason: Its code (``shardcast.engine.forms.ErrorCode``): ``busy``, ``incompatible``...
    """

    def __init__(
        self, message: str, *, source: str | None = None, phase: str = "serve", reason: str
    ) -> None:
        super().__init__(message, source=source)
        self.phase = phase
        self.reason = reason


class EngineUnreachableError(EngineError):
    """An engine does not answer, or not now: it starts, died, or the network is gone."""


class EngineUncertainError(EngineError):
    """An engine was told to do something and did not answer: its state says what became of it."""


class EngineKeyError(EngineError):
    """An engine does not take the key that it was shown."""


class EngineUnsupportedError(EngineError):
    """What answers is no engine that can be driven: the plug-in is not loaded, or it is another."""
