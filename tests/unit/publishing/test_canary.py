"""Canaries: what a file may say, that it travels in the metadata, and when an answer differs."""

from __future__ import annotations

import json

import pytest

from shardcast.canary import METADATA_KEY, canary_in, difference, read_canary
from shardcast.errors import MalformedError

GOOD = {"tolerance": 0.05, "prompts": [{"tokens": [1, 2, 3], "logprobs": [-0.5, -1.25]}]}


@pytest.mark.parametrize(
    "wrong",
    [
        b"nonsense",
        b"{}",
        b'{"prompts": []}',
        b'{"prompts": [{"tokens": [1], "logprobs": []}]}',
        b'{"prompts": [{"tokens": [1, 2], "logprobs": [-1, -1]}]}',
        b'{"prompts": [{"tokens": [1, 2], "logprobs": [0.5]}]}',
        b'{"prompts": [{"tokens": [1, -2], "logprobs": [-0.5]}]}',
        b'{"prompts": [{"tokens": [1, 2], "logprobs": [-0.5]}], "tolerance": 0}',
        b'{"prompts": [{"tokens": [1, 2], "logprobs": [-0.5]}], "tolerence": 1}',
    ],
)
def test_what_is_no_canary_is_refused(wrong: bytes) -> None:
    with pytest.raises(MalformedError):
        read_canary(wrong)


def test_an_answer_differs_where_it_is_further_off_than_it_may_be() -> None:
    canary = read_canary(json.dumps(GOOD).encode())
    assert difference(canary, 0, [-0.46, -1.29]) is None
    said = difference(canary, 0, [-0.5, -1.35])
    assert said is not None
    assert "-1.3500 instead of -1.2500 of token 2 of prompt 0" in said
    assert "1 log-probabilities instead of 2" in (difference(canary, 0, [-0.5]) or "")


def test_without_a_canary_there_is_none() -> None:
    assert canary_in({"note": "x"}) is None
    with pytest.raises(MalformedError):
        canary_in({METADATA_KEY: "x"})
