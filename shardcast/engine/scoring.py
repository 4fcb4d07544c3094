"""Log-probabilities of given tokens, as vLLM and SGLang tell them.

vLLM's completions are asked for ``prompt_logprobs``, which it computes without its prefix cache and without
a tokenizer. SGLang is asked over its own ``/generate``: its completions warn against log-probabilities of a
prompt, and the model's name that they want changes with every swap. The one token that is generated is not
used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardcast.engine.client import EngineClient
from shardcast.errors import EngineRefusedError

_MODELS = "/v1/models"
_COMPLETIONS = "/v1/completions"
_GENERATE = "/generate"

_Read = Callable[[dict[str, Any], Sequence[int]], list[Any]]


async def score_vllm(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it.

    Raises:
        EngineError: If the engine does not answer that way.
    """
    listed = client.members(_MODELS, await client.get(_MODELS)).get("data")
    names = [one["id"] for one in listed or () if isinstance(one, dict) and "id" in one]
    if not names:
        raise _unusable(client, "lists no model")
    body = {"model": names[0], "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
    return await _score(client, tokens, _COMPLETIONS, {**body, "prompt_logprobs": 0}, _of_vllm)


async def score_generated(client: EngineClient, tokens: Sequence[int]) -> list[float]:
    """Return the same from SGLang.

    Raises:
        EngineError: If the engine does not answer that way.
    """
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await _score(client, tokens, _GENERATE, body, _of_sglang)


async def _score(
    client: EngineClient, tokens: Sequence[int], path: str, body: dict[str, object], read: _Read
) -> list[float]:
    answer = await client.post(path, body, timeout_s=client.waits.score_s)
    if answer.status != 200:
        raise _unusable(
            client, f"answers {answer.status} to {path} for a prompt's log-probabilities"
        )
    try:
        found = read(client.members(path, answer.body), tokens)
    except (KeyError, IndexError, TypeError):
        raise _unusable(client, "sends no log-probabilities of the prompt") from None
    if len(found) != len(tokens) - 1 or not all(_is_number(one) for one in found):
        raise _unusable(client, "sends no log-probability of some token")
    return [float(one) for one in found]


def _of_vllm(answer: dict[str, Any], tokens: Sequence[int]) -> list[Any]:
    """Each place has the tokens that were asked for, by id: the prompt's own is among them."""
    places = answer["choices"][0]["prompt_logprobs"]
    return [
        place[str(token)]["logprob"] for place, token in zip(places[1:], tokens[1:], strict=False)
    ]


def _of_sglang(answer: dict[str, Any], tokens: Sequence[int]) -> list[Any]:
    """Each place is a log-probability, a token's id and its text."""
    places = answer["meta_info"]["input_token_logprobs"][1:]
    return [place[0] for place, token in zip(places, tokens[1:], strict=False) if place[1] == token]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _unusable(client: EngineClient, why: str) -> EngineRefusedError:
    return EngineRefusedError(
        f"engine {client.url} {why}: canaries cannot be checked there",
        source=client.url,
        phase="check",
        reason="unsupported",
    )
