"""What travels between an agent and an inference engine: JSON forms, strict and bounded. Pure.

Requests refuse members they do not know (a misspelt option must not be ignored); answers are
read leniently, so that an agent and an engine of different releases understand each other.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec

from shardcast.errors import MalformedError
from shardcast.protocol.documents import (
    Count,
    Digest,
    Document,
    Positive,
    RunName,
    Step,
    check_run,
    decode,
)
from shardcast.protocol.limits import KIB, MAX_BYTES, MIB

API_PREFIX: Final = "/v1/shardcast"
STAGE_PATH: Final = f"{API_PREFIX}/stage"
ACTIVATE_PATH: Final = f"{API_PREFIX}/activate"
STATE_PATH: Final = f"{API_PREFIX}/state"
READY_PATH: Final = f"{API_PREFIX}/ready"
NEWEST_PATH: Final = f"{API_PREFIX}/newest"
LORA_PATH: Final = f"{API_PREFIX}/lora"

VERSION_HEADER: Final = "Shardcast-Version"
"""On every generation's answer: what was served when the request was admitted, as a label."""
SWAPS_HEADER: Final = "Shardcast-Swaps"
"""Beside it: how many swaps had happened then, to be compared with the swap log."""
ANSWERED_HEADER: Final = "Shardcast-Swaps-Answered"
"""And how many when the answer's headers were sent: for an answer that is not streamed, its end."""
START_HEADER: Final = "Shardcast-Start"
"""Which start of a server counted them: a random name. Counts of two starts say nothing of each other."""
UNKNOWN_VERSION: Final = "unknown"
"""The version header's value while nothing of a run is served, or nobody can tell what is."""

MAX_REQUEST_BYTES: Final = 64 * KIB
MAX_ANSWER_BYTES: Final = MIB
MAX_SWAPS: Final = 64
"""Swaps that the log keeps: at one every three minutes those of the last three hours."""
MAX_LORAS: Final = 256
MAX_PATH_CHARS: Final = 4096
"""PATH_MAX of Linux."""
MAX_MESSAGE_CHARS: Final = 2000

DEFAULT_LEASE_SECONDS: Final = 60.0
MIN_LEASE_SECONDS: Final = 0.1
MAX_LEASE_SECONDS: Final = 3600.0

Requests = Literal["recompute", "wait", "abort", "keep"]
"""What becomes of running requests: recomputed under the new weights, finished on the old ones
before, aborted, or continued with the KV cache they have."""

Phase = Literal["boot", "stage", "check", "pause", "load", "lora", "resume", "serve"]
"""Where something failed. ``serve`` is outside of any activation: the engine died by itself."""

ErrorCode = Literal[
    "malformed",  # 422: the request is not what this page says
    "too_large",  # 413: the body is over 64 KiB
    "busy",  # 409: another stage or activation runs
    "conflict",  # 409: one digest under two versions, or a path that is needed and not staged
    "superseded",  # 409: given up because another version was asked for: nothing has failed
    "incompatible",  # 409: names, shapes or types are not those of the engine's model
    "integrity",  # 424: the bytes at the path are not those of the digest
    "unavailable",  # 424: the path or its store cannot be read
    "refused",  # 409: the engine's settings do not allow it (keep without salting, asleep)
    "unsupported",  # 501: this engine or its version cannot do it
    "timeout",  # 504: the lease ended first
    "failed",  # 500: the engine failed; what it serves now is in the state
    "dead",  # 503: the engine process is gone
]
STATUS_OF: Final[dict[str, int]] = {
    "malformed": 422,
    "too_large": 413,
    "busy": 409,
    "conflict": 409,
    "superseded": 409,
    "incompatible": 409,
    "integrity": 424,
    "unavailable": 424,
    "refused": 409,
    "unsupported": 501,
    "timeout": 504,
    "failed": 500,
    "dead": 503,
}

Millis = Annotated[float, msgspec.Meta(ge=0)]
Lease = Annotated[float, msgspec.Meta(ge=MIN_LEASE_SECONDS, le=MAX_LEASE_SECONDS)]
PathText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARS)]
LoraName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]


# --- a version's name ------------------------------------------------------------------------


class Identity(NamedTuple):
    """Which version: the digest of its manifest decides, run and number are for people."""

    run: str
    version: int
    digest: str

    def __str__(self) -> str:
        return label_of(self)


_LABEL: Final = re.compile(
    r"^([a-z0-9][a-z0-9._-]{0,63})/([1-9]\d{0,15})/([0-9a-f]{64})\Z", re.ASCII
)


def label_of(identity: Identity) -> str:
    """Return ``RUN/VERSION/DIGEST``: the version header, vLLM's weight version, a rollout's stamp."""
    return f"{identity.run}/{identity.version}/{identity.digest}"


def parse_label(text: str) -> Identity | None:
    """Return the version that a label names, or None if it is none of ours (``default``...)."""
    match = _LABEL.match(text)
    if match is None or int(match[2]) > MAX_BYTES:
        return None
    return Identity(match[1], int(match[2]), match[3])


# --- requests --------------------------------------------------------------------------------


class Request(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the requests: they all name a run."""

    run: RunName

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: If the run's name is reserved.
        """
        check_run(self.run)


def check_path(path: str) -> None:
    """Check a path on the engine's host: absolute, one that says where it leads.

    Raises:
        MalformedError: If it is relative, has a NUL or a ``..`` in it.
    """
    if not posixpath.isabs(path) or "\0" in path or ".." in path.split("/"):
        raise MalformedError(f"path must be absolute and without '..': {path[:80]!r}")


class StageRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verify a version directory, check it against the model, hold it; the engine goes on serving."""

    version: Positive
    digest: Digest
    path: PathText
    step: Step = None

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: Naming the member that is wrong.
        """
        super().check()
        check_path(self.path)

    @property
    def identity(self) -> Identity:
        """The version that it is about."""
        return Identity(self.run, self.version, self.digest)


class ActivateRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause, load, check, resume. ``path`` may be left out where the version is staged."""

    version: Positive
    digest: Digest
    path: PathText | None = None
    step: Step = None
    requests: Requests = "recompute"
    lease_s: Lease = DEFAULT_LEASE_SECONDS

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: Naming the member that is wrong.
        """
        super().check()
        if self.path is not None:
            check_path(self.path)

    @property
    def identity(self) -> Identity:
        """The version that it is about."""
        return Identity(self.run, self.version, self.digest)


class NewestRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the run is, from which the engine knows its lag. ``max_lag`` None: any lag is fine."""

    version: Positive
    max_lag: Count | None = None


class LoraRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load an adapter directory of a run, or unload what ``name`` stands for.

    ``name`` is what people call the adapter. Requests name the loaded one by ``model`` of the
    state's ``lora``, which carries the digest and is never used again for other content.
    """

    action: Literal["load", "unload"]
    name: LoraName
    version: Positive
    digest: Digest
    path: PathText | None = None

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: Naming the member that is wrong.
        """
        super().check()
        if self.path is not None:
            check_path(self.path)
        elif self.action == "load":
            raise MalformedError("an adapter to load needs its path")

    @property
    def identity(self) -> Identity:
        """The version that it is about."""
        return Identity(self.run, self.version, self.digest)


# --- what an engine says ---------------------------------------------------------------------


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A version that an engine runs. ``since`` in Unix milliseconds.

    ``nonfinite`` says which tensor of it holds NaN or an infinity, and where; empty where none does,
    or where the engine does not look.
    """

    version: Positive
    digest: Digest
    step: Step = None
    since: Count
    nonfinite: str = ""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A version that every rank has verified and holds. ``nonfinite`` as in ``Served``."""

    run: RunName
    version: Positive
    digest: Digest
    step: Step = None
    path: PathText
    since: Count
    nonfinite: str = ""


class Activating(msgspec.Struct, frozen=True, kw_only=True):
    """An activation in progress and the phase it is in."""

    run: RunName
    version: Positive
    digest: Digest
    phase: Phase
    since: Count


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last thing that went wrong. Gone after the next activation that succeeds."""

    phase: Phase
    code: str
    message: str
    version: Positive | None
    t: Count


class Swap(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """One pause in the life of an engine. ``n`` counts from 1; times in Unix milliseconds.

    ``from`` and ``to`` are labels, ``from`` null where it was not known what was served. Where the
    load failed and the old version was loaded again, both are the same. ``resumed_at`` is null
    where the engine stayed paused.
    """

    n: Positive
    from_: str | None
    to: str | None
    paused_at: Count
    resumed_at: Count | None
    pause_ms: Millis
    requests: Requests


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter: what it is called, and the ``model`` by which requests name it."""

    name: LoraName
    model: str
    run: RunName
    version: Positive
    digest: Digest
    path: PathText
    loaded: bool


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine says about itself.

    Attributes:
        engine: ``vllm``, ``sglang``, ``torch``.
        run: The run that ``served`` is of, or whose newest version was told; else null.
        served: Null where the engine was booted from elsewhere and nothing was activated, or where
            it is poisoned.
        activating: Null between activations.
        poisoned: Nobody knows which weights are loaded; only a full activation helps.
        lag: How many versions ``served`` is behind ``newest``; null where either is unknown.
        swap_count: Swaps since the server started, those that left the log included.
        start: A random name of that start, as in the header beside the counts; empty: not told.
        keep_allowed: Whether ``requests: keep`` is (every request is salted by version).
    """

    engine: str
    engine_version: str
    plugin_version: str
    run: RunName | None = None
    served: Served | None = None
    staged: Staged | None = None
    activating: Activating | None = None
    paused: bool = False
    poisoned: bool = False
    ready: bool = False
    why: str = ""
    lag: Count | None = None
    newest: Positive | None = None
    max_lag: Count | None = None
    last_failure: Failure | None = None
    swap_count: Count = 0
    start: str = ""
    swaps: Annotated[list[Swap], msgspec.Meta(max_length=MAX_SWAPS)] = []
    lora: Annotated[list[Lora], msgspec.Meta(max_length=MAX_LORAS)] = []
    keep_allowed: bool = False

    @property
    def identity(self) -> Identity | None:
        """What it serves, or None where that is not known."""
        if self.run is None or self.served is None:
            return None
        return Identity(self.run, self.served.version, self.served.digest)


class Activated(msgspec.Struct, frozen=True, kw_only=True):
    """The version that an activation brought, or found served already."""

    run: RunName
    version: Positive
    digest: Digest
    step: Step = None


class StageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """200 of ``stage``, ``newest`` and ``lora``."""

    state: EngineState


class ActivateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """200 of ``activate``. ``pause_ms`` is 0 where the digest was served already."""

    activated: Activated
    pause_ms: Millis
    phases_ms: dict[str, Millis]
    state: EngineState


class ReadyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """200 or 503 of ``ready``. ``why`` is empty where it is."""

    ready: bool
    why: str


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: a code of ``STATUS_OF``, the phase, and who must do what."""

    code: str
    message: str
    phase: Phase | None = None


class FaultAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is not 200, and the state after it where there is one."""

    error: Fault
    state: EngineState | None = None


_T = TypeVar("_T", bound=msgspec.Struct)
_R = TypeVar("_R", bound=Request)


def read_request(body: bytes, kind: type[_R]) -> _R:
    """Decode a request's body.

    Raises:
        LimitError: If it is over 64 KiB.
        MalformedError: If it is anything but a valid request of ``kind``.
    """
    return decode(body, kind, limit=MAX_REQUEST_BYTES, what="request")


def read_answer(body: bytes, kind: type[_T], *, source: str) -> _T:
    """Decode an engine's answer.

    Raises:
        LimitError: If it is over 1 MiB.
        MalformedError: If it is anything but a valid answer of ``kind``; ``source`` names the engine.
    """
    try:
        return decode(body, kind, limit=MAX_ANSWER_BYTES, what="answer")
    except MalformedError as error:
        raise type(error)(error.message, source=source) from error


def write(form: msgspec.Struct) -> bytes:
    """Encode a request or an answer."""
    return msgspec.json.encode(form)


# --- errors of ranks -------------------------------------------------------------------------

_CODED: Final = re.compile(r"shardcast\[([a-z_]{1,32})\]: (.*)", re.DOTALL)


def coded(code: ErrorCode, message: str) -> str:
    """Return a message that carries its code: an engine's ranks send text, and no types, upwards."""
    return f"shardcast[{code}]: {message}"


def read_coded(text: str) -> tuple[str, str]:
    """Return the code and the message of a text that may have passed through other hands.

    Whatever stands before the mark is theirs. A text without one is a failure of the engine.
    """
    match = _CODED.search(text)
    if match is None or match[1] not in STATUS_OF:
        return "failed", text[:MAX_MESSAGE_CHARS]
    return match[1], match[2][:MAX_MESSAGE_CHARS]
