"""`follow --engine`: what is said of a key that others could read."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcast.cli.engines import (
    ActivateChoice,
    EngineChoice,
    EngineOptions,
    RequestsChoice,
    readable_keys,
)


def options(token: Path | None, *urls: str) -> EngineOptions:
    return EngineOptions(
        kind=EngineChoice.VLLM,
        urls=urls,
        token_file=token,
        activate=ActivateChoice.AUTO,
        max_swapping=1,
        max_lag=None,
        requests=RequestsChoice.RECOMPUTE,
        lease="60s",
        lora=None,
        check_canary=False,
    )


def test_a_key_that_travels_in_clear_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDCAST_ENGINE_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text("key\n")
    here = ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://far:1")
    far = ("http://far:1", "http://10.0.0.7:8000")
    assert readable_keys(options(token, *here, *far)) == list(far)
    assert readable_keys(options(None, *far)) == []
    monkeypatch.setenv("SHARDCAST_ENGINE_TOKEN", "key")
    assert readable_keys(options(None, *far)) == list(far)
