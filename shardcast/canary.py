"""Canaries: prompts and what the trainer's own weights say about them, in a version's metadata. Pure.

A digest proves that an engine was given the right bytes. A canary proves that it answers as the trainer
does: with the right architecture, quantisation and kernels, and no layer left behind. Log-probabilities
of given tokens are compared, not generated text: one near tie would make a text differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from shardcast.errors import MalformedError
from shardcast.protocol.documents import Document, decode
from shardcast.protocol.limits import MAX_METADATA_BYTES

METADATA_KEY: Final = "shardcast.canary"
MAX_PROMPTS: Final = 64
MAX_TOKENS: Final = 4096
DEFAULT_TOLERANCE: Final = 0.1
"""bf16 kernels differ by 0.02 or so from one engine to another; a wrong layer, by several."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids, and the log-probability of each but the first given those before it."""

    tokens: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]],
        msgspec.Meta(min_length=2, max_length=MAX_TOKENS),
    ]
    logprobs: Annotated[list[float], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]


class Canary(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts, and by how much a log-probability may differ."""

    prompts: Annotated[list[Prompt], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
    tolerance: Annotated[float, msgspec.Meta(gt=0)] = DEFAULT_TOLERANCE

    def check(self) -> None:
        """Check what types cannot say.

        Raises:
            MalformedError: Naming the prompt.
        """
        for number, prompt in enumerate(self.prompts):
            if len(prompt.logprobs) != len(prompt.tokens) - 1:
                raise MalformedError(
                    f"prompt {number} has {len(prompt.tokens)} tokens and "
                    f"{len(prompt.logprobs)} logprobs: one for each token but the first is needed"
                )
            if not all(math.isfinite(one) and one <= 0.0 for one in prompt.logprobs):
                raise MalformedError(f"prompt {number} has logprobs above zero or not finite")


def read_canary(data: bytes) -> Canary:
    """Decode a canary.

    Raises:
        MalformedError: If it is none.
        LimitError: If it is longer than a version's metadata may be.
    """
    return decode(data, Canary, limit=MAX_METADATA_BYTES, what="canary")


def write_canary(canary: Canary) -> str:
    """Return it as compact text, for a version's metadata."""
    return msgspec.json.encode(canary).decode()


def canary_in(metadata: Mapping[str, str]) -> Canary | None:
    """Return a version's canary, None where it has none.

    Raises:
        MalformedError: If what it has is none.
    """
    text = metadata.get(METADATA_KEY)
    return None if text is None else read_canary(text.encode())


def difference(canary: Canary, number: int, scores: Sequence[float]) -> str | None:
    """Say how an engine's log-probabilities of one prompt differ too much, None where they do not."""
    expected = canary.prompts[number].logprobs
    if len(scores) != len(expected):
        return f"prompt {number} has {len(scores)} log-probabilities instead of {len(expected)}"
    gaps = [abs(ours - theirs) for ours, theirs in zip(expected, scores, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] <= canary.tolerance:
        return None
    return (
        f"log-probability {scores[worst]:.4f} instead of {expected[worst]:.4f} of token "
        f"{worst + 1} of prompt {number}, more than {canary.tolerance:g} apart"
    )
