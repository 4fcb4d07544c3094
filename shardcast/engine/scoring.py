"""Log-probabilities of given tokens, over the completions routes of vLLM and of SGLang.

vLLM is asked for ``prompt_logprobs``, which it computes without its prefix cache and without a
tokenizer. SGLang echoes the prompt with them. The one token that is generated is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardcast.engine.client import EngineClient
from shardcast.errors import EngineRefusedError

_MODELS = "/v1/models"
_COMPLETIONS = "/v1/completions"
_TIMEOUT_S = 120.0
"""One prefill that queues behind running requests."""

_Read = Callable[[dict[str, Any], Sequence[int]], list[Any]]


async def score_vllm(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it.

    Raises:
        EngineError: If the engine does not answer that way.
    """
    return await _score(client, tokens, {"prompt_logprobs": 0}, _of_vllm)


async def score_echoed(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """Return the same from a server that echoes prompts (SGLang).

    Raises:
        EngineError: If the engine does not answer that way.
    """
    return await _score(client, tokens, {"echo": True, "logprobs": 1}, _of_echo)


async def _score(
    client: EngineClient, tokens: Sequence[int], wish: dict[str, object], read: _Read
) -> list[float]:
    listed = client.members(_MODELS, await client.get(_MODELS)).get("data")
    names = [one["id"] for one in listed or () if isinstance(one, dict) and "id" in one]
    if not names:
        raise _unusable(client, "lists no model")
    body = {"model": names[0], "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
    answer = await client.post(_COMPLETIONS, {**body, **wish}, timeout_s=_TIMEOUT_S)
    if answer.status != 200:
        raise _unusable(client, f"answers {answer.status} to a completion with {', '.join(wish)}")
    try:
        found = read(client.members(_COMPLETIONS, answer.body)["choices"][0], tokens)
    except (KeyError, IndexError, TypeError):
        raise _unusable(client, "sends no log-probabilities of the prompt") from None
    if len(found) != len(tokens) - 1 or not all(_is_number(one) for one in found):
        raise _unusable(client, "sends no log-probability of some token")
    return [float(one) for one in found]


def _of_vllm(choice: dict[str, Any], tokens: Sequence[int]) -> list[Any]:
    """Each place has the tokens that were asked for, by id: the prompt's own is among them."""
    places = choice["prompt_logprobs"]
    return [
        place[str(token)]["logprob"] for place, token in zip(places[1:], tokens[1:], strict=False)
    ]


def _of_echo(choice: dict[str, Any], tokens: Sequence[int]) -> list[Any]:
    found: list[Any] = choice["logprobs"]["token_logprobs"][1 : len(tokens)]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _unusable(client: EngineClient, why: str) -> EngineRefusedError:
    return EngineRefusedError(
        f"engine {client.url} {why}: canaries cannot be checked there",
        source=client.url,
        phase="check",
        reason="unsupported",
    )
