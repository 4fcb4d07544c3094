"""What the API process and an engine's ranks say to each other. Pure; neither torch nor vLLM.

One worker method, ``shardcast``, is the whole interface. The API process (or a program that has an
``LLM``) calls it on all ranks at once and gets one reply for each, in order::

    replies = await engine_client.collective_rpc(RPC, args=(stage_command(target),))
    report = combine(replies)

It is called between two steps of the engine, so a call must be short, and it never raises on
purpose: vLLM's multi-process executor stops reading answers at the first rank that raises, and
takes what the others said for the answer to the next call.

- ``stage``: begin to verify a version in a thread of each rank, and return at once. The engine goes
  on serving. Ask ``state`` (every 20 - 100 ms) until ``report.staged`` or ``report.failed`` is
  about that digest. Staging the staged version, or the served one, is done at once. Staging another
  version gives up the one before.
- ``state``: nothing but the reply.
- ``activate``: only for what is staged on every rank, only while the engine is paused. Blocks until
  every rank has loaded it, or every rank is back at what it had. ``outcome`` says which:

  - ``activated``: every rank runs it. Now the label may be set, and not before.
  - ``already``: every rank ran it before; nothing was touched.
  - ``refused``: no rank has touched its model; what was served is served. Resume.
  - ``restored``: loading failed somewhere, and every rank has loaded again what it served before,
    from the files that it had verified then. Resume; the label stays.
  - ``poisoned``: nobody knows what some rank runs. Do not resume. The next ``activate`` that ends
    in ``activated`` clears it: every activation is a full load.

  Where NaN may lie in the KV memory (``suspect``) it is wiped before ``activated`` is said; with
  ``keep``, where running requests need what is there, that is ``refused``.

  ``code``, ``message`` and ``phase`` say why for the last three. LoRA adapters are gone after
  ``activated`` and ``restored`` (vLLM drops them with every reload).
- ``drop``: give up what is staged, and its lease. What is served stays held: it is needed where the
  next load fails.

Prefix, encoder and multi-modal caches are the caller's to reset (``pause_generation`` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from shardcast.engine.forms import Identity

RPC: Final = "shardcast"
"""Name of the worker method."""

Outcome = Literal["ok", "activated", "already", "refused", "restored", "poisoned"]

_WORST_FIRST: Final[tuple[Outcome, ...]] = (
    "poisoned",
    "restored",
    "refused",
    "activated",
    "already",
    "ok",
)


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A version directory on this host, and what it is.

    Attributes:
        nonfinite: Which tensor holds NaN or an infinity, and where; empty where all numbers are
            finite. The ranks find out; nobody tells them.
    """

    run: str
    version: int
    digest: str
    path: str
    step: int | None = None
    nonfinite: str = ""

    @property
    def identity(self) -> Identity:
        """The version that it is."""
        return Identity(self.run, self.version, self.digest)


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank is told. ``keep``: running requests go on with what lies in the KV memory."""

    op: Literal["stage", "state", "activate", "drop"]
    target: Target | None = None
    keep: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank is with the version that it is staging.

    Attributes:
        done: How many of ``bytes`` it has hashed and looked at.
        steps: Grows with whatever it does, also where it hashes nothing: maps pages, packs weights.
    """

    digest: str
    done: int
    bytes: int
    steps: int = 0


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the last staging ended; ``code`` is one of ``shardcast.engine.forms.ErrorCode``."""

    digest: str
    version: int
    code: str
    message: str


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says, after what it was told.

    Attributes:
        rank: Its number in the world of all ranks.
        outcome: See the module; ``ok`` for everything but ``activate``.
        code: Of ``ErrorCode``; empty where nothing failed.
        phases_ms: What the activation's time went into: ``check``, ``load``, ``restore``; of
            ``load``, ``wipe`` is what the KV memory took.
        served: What it runs. None: booted from elsewhere, or poisoned.
        staged: What it has verified, holds, and could load now.
        staging: What it is verifying at the moment.
        failed: How the last staging ended, if it failed.
        poisoned: Why it does not know what it runs; empty where it does.
        suspect: Why NaN may lie in the KV memory, so that the next load wipes it and nobody may
            keep what is there; empty where it need not.
        gemm: How many linear layers, and layers' experts, go through which kernel (CPU), or ``{"cuda": n}``.
    """

    rank: int
    outcome: Outcome = "ok"
    code: str = ""
    message: str = ""
    phase: str = ""
    phases_ms: dict[str, float] = {}
    served: Target | None = None
    staged: Target | None = None
    staging: Progress | None = None
    failed: RankFailure | None = None
    poisoned: str = ""
    suspect: str = ""
    gemm: dict[str, int] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks say together: the least that is true of every one, the worst that is of any."""

    outcome: Outcome
    code: str
    message: str
    phase: str
    phases_ms: dict[str, float]
    served: Target | None
    staged: Target | None
    staging: Progress | None
    failed: RankFailure | None
    poisoned: str
    suspect: str
    gemm: dict[str, int]
    ranks: int


def stage_command(target: Target) -> dict[str, Any]:
    """Return what to call ``RPC`` with to begin staging."""
    return _plain(Command(op="stage", target=target))


def activate_command(target: Target, *, keep: bool = False) -> dict[str, Any]:
    """Return what to call ``RPC`` with to load what is staged."""
    return _plain(Command(op="activate", target=target, keep=keep))


def state_command() -> dict[str, Any]:
    """Return what to call ``RPC`` with to ask."""
    return _plain(Command(op="state"))


def drop_command() -> dict[str, Any]:
    """Return what to call ``RPC`` with to give up what is staged."""
    return _plain(Command(op="drop"))


def read_command(raw: object) -> Command:
    """Return the command that a rank was sent.

    Raises:
        ValueError: If it is none.
    """
    return msgspec.convert(raw, Command)


def write_reply(reply: RankReply) -> dict[str, Any]:
    """Return a reply as it travels."""
    return _plain(reply)


def combine(replies: Sequence[object]) -> Report:
    """Put the replies of all ranks together.

    A version counts as served or staged only where every rank says so; messages name the rank.

    Raises:
        ValueError: If there is no reply, or one is malformed.
    """
    ranks = [msgspec.convert(reply, RankReply) for reply in replies]
    if not ranks:
        raise ValueError("no rank has answered")
    worst = next(kind for kind in _WORST_FIRST if any(r.outcome == kind for r in ranks))
    speaker = next((r for r in ranks if r.outcome == worst and r.code), ranks[0])
    poisoned = next((r for r in ranks if r.poisoned), None)
    failed = next((r for r in ranks if r.failed), None)
    staging = [r.staging for r in ranks if r.staging]
    return Report(
        outcome=worst,
        code=speaker.code,
        message=speaker.message,
        phase=speaker.phase,
        phases_ms={
            name: max(r.phases_ms.get(name, 0.0) for r in ranks)
            for name in dict.fromkeys(name for r in ranks for name in r.phases_ms)
        },
        served=_common([r.served for r in ranks]),
        staged=_common([r.staged for r in ranks]),
        staging=min(staging, key=lambda one: (one.done, one.steps)) if staging else None,
        failed=None if failed is None else failed.failed,
        poisoned="" if poisoned is None else poisoned.poisoned,
        suspect=next((r.suspect for r in ranks if r.suspect), ""),
        gemm={
            name: sum(r.gemm.get(name, 0) for r in ranks)
            for name in dict.fromkeys(name for r in ranks for name in r.gemm)
        },
        ranks=len(ranks),
    )


def _common(targets: Sequence[Target | None]) -> Target | None:
    """Return what all have, by digest; None where one lacks it or has another."""
    first = targets[0]
    same = first is not None and all(
        one is not None and one.identity == first.identity for one in targets
    )
    return first if same else None


def _plain(form: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(form)
    return plain
