"""Log-probabilities of given tokens, over the completions route that vLLM and SGLang both have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardcast.engine.client import EngineClient
from shardcast.errors import EngineRefusedError

_MODELS = "/v1/models"
_COMPLETIONS = "/v1/completions"
_TIMEOUT_S = 120.0
"""One prefill that queues behind running requests."""


async def score(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it.

    The prompt is echoed with its log-probabilities; the one token that is generated is not used.

    Raises:
        EngineError: If the engine does not answer that way.
    """
    listed = client.members(_MODELS, await client.get(_MODELS)).get("data")
    names = [one["id"] for one in listed or () if isinstance(one, dict) and "id" in one]
    if not names:
        raise _unusable(client, "lists no model")
    answer = await client.post(
        _COMPLETIONS,
        {
            "model": names[0],
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        },
        timeout_s=_TIMEOUT_S,
    )
    if answer.status != 200:
        raise _unusable(client, f"answers {answer.status} to a completion with echo and logprobs")
    found = _logprobs(client.members(_COMPLETIONS, answer.body))
    if found is None or len(found) < len(tokens):
        raise _unusable(client, "sends no log-probabilities of the prompt")
    scores = found[1 : len(tokens)]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in scores):
        raise _unusable(client, "sends log-probabilities that are no numbers")
    return [float(one) for one in scores]


def _logprobs(answer: dict[str, Any]) -> list[Any] | None:
    try:
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, list) else None


def _unusable(client: EngineClient, why: str) -> EngineRefusedError:
    return EngineRefusedError(
        f"engine {client.url} {why}: canaries cannot be checked there",
        source=client.url,
        phase="check",
        reason="unsupported",
    )
