"""The forms on the wire: pinned bytes that every later version must read, and strict requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcast.engine.forms import (
    STATUS_OF,
    ActivateAnswer,
    ActivateRequest,
    Activating,
    EngineState,
    Failure,
    FaultAnswer,
    Lora,
    LoraRequest,
    NewestRequest,
    Served,
    Staged,
    StageRequest,
    Swap,
    coded,
    read_answer,
    read_coded,
    read_request,
    write,
)
from shardcast.errors import LimitError, MalformedError

A, B = "a" * 64, "b" * 64

STATE = {
    "engine": "vllm",
    "engine_version": "0.32.0",
    "plugin_version": "0.1.0",
    "run": "policy",
    "served": {"version": 56, "digest": A, "step": 560, "since": 1},
    "staged": {
        "run": "policy",
        "version": 57,
        "digest": B,
        "step": None,
        "path": "/models/policy/versions/000057",
        "since": 2,
    },
    "activating": {"run": "policy", "version": 57, "digest": B, "phase": "load", "since": 3},
    "paused": True,
    "poisoned": False,
    "ready": False,
    "why": "paused",
    "lag": 1,
    "newest": 57,
    "max_lag": 3,
    "last_failure": {"phase": "load", "code": "failed", "message": "no", "version": 57, "t": 4},
    "swap_count": 9,
    "swaps": [
        {
            "n": 9,
            "from": None,
            "to": f"policy/56/{A}",
            "paused_at": 5,
            "resumed_at": None,
            "pause_ms": 1.5,
            "requests": "recompute",
        }
    ],
    "lora": [
        {
            "name": "style",
            "model": "style@1-aaaaaaaaaaaa",
            "run": "style",
            "version": 1,
            "digest": A,
            "path": "/adapters/1",
            "loaded": True,
        }
    ],
    "keep_allowed": True,
}


def test_a_state_as_it_has_always_been() -> None:
    state = read_answer(json.dumps(STATE).encode(), EngineState, source="x")
    later = {
        name: {**STATE[name], "nonfinite": ""}  # type: ignore[dict-item]
        for name in ("served", "staged")
    }
    assert json.loads(write(state)) == {**STATE, **later, "start": ""}
    assert state.served == Served(version=56, digest=A, step=560, since=1)
    assert isinstance(state.staged, Staged)
    assert isinstance(state.activating, Activating)
    assert isinstance(state.last_failure, Failure)
    assert isinstance(state.swaps[0], Swap)
    assert state.swaps[0].from_ is None
    assert isinstance(state.lora[0], Lora)
    assert str(state.identity) == f"policy/56/{A}"


def test_answers_of_a_later_version_are_read() -> None:
    later = {**STATE, "new": [1], "served": {"version": 1, "digest": A, "since": 1, "new": 2}}
    assert read_answer(json.dumps(later).encode(), EngineState, source="x").served is not None
    fault = {"error": {"code": "of the future", "message": "m", "phase": None}, "more": 1}
    assert read_answer(json.dumps(fault).encode(), FaultAnswer, source="x").error.code
    with pytest.raises(MalformedError) as caught:
        read_answer(b"{}", ActivateAnswer, source="http://engine")
    assert caught.value.source == "http://engine"


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (StageRequest, {"path": "/x", "step": 3}),
        (ActivateRequest, {"path": "/x", "step": 3, "requests": "wait", "lease_s": 5.5}),
        (ActivateRequest, {}),
        (LoraRequest, {"action": "load", "name": "style", "path": "/x"}),
        (LoraRequest, {"action": "unload", "name": "style"}),
    ],
)
def test_requests_and_what_they_refuse(kind: type[Any], members: dict[str, Any]) -> None:
    good = {"run": "policy", "version": 1, "digest": A, **members}
    request = read_request(json.dumps(good).encode(), kind)
    assert request.identity == ("policy", 1, A)
    for wrong in (
        {**good, "more": 1},
        {**good, "run": "runs"},
        {**good, "version": 0},
        {**good, "version": True},
        {**good, "digest": A[:-1]},
        {**good, "path": "x"},
        {name: value for name, value in good.items() if name != "digest"},
    ):
        with pytest.raises(MalformedError):
            read_request(json.dumps(wrong).encode(), kind)
    with pytest.raises(LimitError):
        read_request(json.dumps(good).encode() + b" " * 65_536, kind)


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["run", "version", "digest", "path", "max_lag", "x"]), inner, max_size=4
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    for kind in (StageRequest, ActivateRequest, NewestRequest, LoraRequest):
        try:
            read_request(body, kind)
        except MalformedError as error:
            assert len(error.message) < 400  # noqa: PT017 - most bodies are refused, not all


def test_codes_survive_the_hands_that_they_pass_through() -> None:
    text = f"Call to collective_rpc failed: {coded('integrity', 'shard 3: bad')}"
    assert read_coded(text) == ("integrity", "shard 3: bad")
    assert read_coded("boom") == ("failed", "boom")
    assert read_coded("shardcast[made_up]: x") == ("failed", "shardcast[made_up]: x")
    for code, status in STATUS_OF.items():
        assert 400 <= status < 600, code
