"""Which version wrote a rollout: from an answer's headers, the engine's swap log, or its spans. Pure.

A client that keeps rollouts for training calls ``stamp`` with the headers of each answer. An answer
that was not streamed says by itself whether a swap fell into it. A streamed one has its headers at
its beginning, so the engine's state, read after the last token, must say whether any swap came
since; one read serves many answers. A server that was started again counts swaps anew: both must be of
one start. Whatever is not certain is marked ambiguous, never guessed.

Where the server offers it (``/inference/v1/generate``), every token's version is known: ``spans_of``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardcast.engine.forms import (
    ANSWERED_HEADER,
    START_HEADER,
    SWAPS_HEADER,
    VERSION_HEADER,
    EngineState,
    Identity,
    Swap,
    parse_label,
)
from shardcast.errors import MalformedError

_MOST_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a rollout is stamped with.

    Attributes:
        identity: The version at admission; None where the engine served none of a run.
        ambiguous: Whether other versions may have had a part in it.
        why: Says what is not certain; empty where all is.
        candidates: The labels that may have had a part, the one at admission first.
    """

    identity: Identity | None
    ambiguous: bool
    why: str
    candidates: tuple[str, ...]

    def fields(self) -> dict[str, str | int | bool | None]:
        """Return it as members of a JSON object: ``run``, ``version``, ``manifest``, ``ambiguous``."""
        if self.identity is None:
            return {"run": None, "version": None, "manifest": None, "ambiguous": self.ambiguous}
        return {
            "run": self.identity.run,
            "version": self.identity.version,
            "manifest": self.identity.digest,
            "ambiguous": self.ambiguous,
        }


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` up to, not including, ``end`` of an answer, and what wrote them."""

    identity: Identity | None
    start: int
    end: int


def stamp(
    headers: Mapping[str, str], state: EngineState | None = None, *, streamed: bool = False
) -> Stamp:
    """Return the stamp of one answer.

    Args:
        headers: The answer's, in any case.
        state: The engine's state, read after the answer's last token. Needed for a streamed
            answer; for another one it only tells which swap fell into it.
        streamed: Whether the answer was streamed. One of ``text/event-stream`` is, in any case.

    Raises:
        MalformedError: If the headers are not there: the server runs without our plug-ins, or a
            proxy between has dropped them.
    """
    found = {name.lower(): value for name, value in headers.items()}
    label = found.get(VERSION_HEADER.lower())
    if label is None:
        raise MalformedError(f"the answer has no {VERSION_HEADER} header")
    admitted = _number(found, SWAPS_HEADER)
    last = _number(found, ANSWERED_HEADER)
    identity = parse_label(label)
    if identity is None:
        why = "the engine served no version of a run when the request was admitted"
        return Stamp(None, True, why, (label,))
    other = _other_start(found.get(START_HEADER.lower(), ""), state)
    if streamed or found.get("content-type", "").lower().startswith("text/event-stream"):
        if state is None:
            why = "a streamed answer needs the state after its end"
            return Stamp(identity, True, why, (label,))
        if other:
            return Stamp(identity, True, other, (label,))
        last = state.swap_count
    if last < admitted:
        return Stamp(identity, True, "its counts of swaps go back", (label,))
    if last == admitted:
        return Stamp(identity, False, "", (label,))
    log = {} if state is None or other else {swap.n: swap for swap in state.swaps}
    return _over_swaps(identity, label, range(admitted + 1, last + 1), log)


def spans_of(weight_versions: Sequence[Mapping[str, Any]]) -> tuple[Span, ...]:
    """Return which version wrote which tokens, from ``weight_versions`` of vLLM's generate route.

    Raises:
        MalformedError: If they are not spans that follow each other.
    """
    spans: list[Span] = []
    for one in weight_versions:
        version, start, end = one.get("version"), one.get("start"), one.get("end")
        begin = spans[-1].end if spans else 0
        if not isinstance(version, str) or not isinstance(start, int) or not isinstance(end, int):
            raise MalformedError(f"not a span of tokens: {str(dict(one))[:200]}")
        if start < begin or end < start:
            raise MalformedError(f"tokens {start} to {end} do not follow those up to {begin}")
        spans.append(Span(parse_label(version), start, end))
    return tuple(spans)


def _other_start(start: str, state: EngineState | None) -> str:
    """Return why a state's counts say nothing of an answer's; empty where they do."""
    if state is None or (start and start == state.start):
        return ""
    if start and state.start:
        return "the server was restarted since, or the state is another server's"
    return (
        f"no {START_HEADER} in headers or state (an older release of shardcast-cdn?): the server may have"
        " been restarted since"
    )


def _over_swaps(identity: Identity, label: str, numbers: range, log: Mapping[int, Swap]) -> Stamp:
    swaps: list[Swap | None] = [log.get(number) for number in numbers]
    known = [swap for swap in swaps if swap is not None]
    others = [swap.to or "unknown" for swap in known if swap.to != label]
    if len(known) == len(swaps) and not others:
        return Stamp(identity, False, "", (label,))  # paused, and went on with the same weights
    seen = tuple(dict.fromkeys((label, *others)))
    what = f"swap {numbers[0]}" if len(numbers) == 1 else f"swaps {numbers[0]} to {numbers[-1]}"
    return Stamp(identity, True, f"{what} fell between its admission and its end", seen)


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name.lower(), "")
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise MalformedError(f"the answer's {name} header is not a count: {text[:40]!r}")
    return int(text)
