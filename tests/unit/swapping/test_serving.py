"""Servers that cannot be driven are told apart, and each is told what to change; and metrics."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

import trainer_adapter.vllm
from shardcast.engine.forms import ActivateRequest, NewestRequest
from shardcast.errors import ShardcastError
from tests.unit.swapping.engine import NEW, NEXT, FakeClock, FakeEngine
from trainer_adapter.vllm.configured import stale_drafts
from trainer_adapter.vllm.machine import Facts
from trainer_adapter.vllm.metrics import StateCollector, SwapMetrics
from trainer_adapter.vllm.serving import Settings, demands_key, keep_refusal, unsupported
from trainer_adapter.vllm.swap import Swapper

GOOD = Settings(engine_version="0.32.0", plugins="shardcast,shardcast_http", backend="shardcast")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (replace(GOOD, engine=False), "no engine"),
        (replace(GOOD, plugins="shardcast_http"), "VLLM_PLUGINS=shardcast,shardcast_http"),
        (replace(GOOD, plugins=""), "VLLM_PLUGINS=shardcast,shardcast_http"),
        (replace(GOOD, plugins="shardcast_http,mine"), "add the others"),
        (replace(GOOD, backend=None), '--weight-transfer-config \'{"backend": "shardcast"}\''),
        (replace(GOOD, backend="nccl"), "'nccl'"),
        (replace(GOOD, servers=4), "--api-server-count 1"),
        (replace(GOOD, data_parallel=2), "independent servers"),
        (replace(GOOD, data_parallel=2), "without any --data-parallel-... option"),
        (replace(GOOD, connector={"Lmcache": False}), "Lmcache"),
    ],
)
def test_servers_that_cannot_be_driven(settings: Settings, said: str) -> None:
    assert said in unsupported(settings)


def test_servers_that_can() -> None:
    assert unsupported(GOOD) == ""
    assert unsupported(replace(GOOD, plugins=None)) == ""
    assert unsupported(replace(GOOD, plugins="other, shardcast ,shardcast_http")) == ""
    assert unsupported(replace(GOOD, connector={"Good": True})) == ""


@pytest.mark.parametrize(
    ("given", "environment", "demands"),
    [
        (None, None, False),
        (None, "", False),
        (None, "k", True),
        ([], "k", True),
        (["k"], None, True),
        (["k"], "other", True),
        (["", "k"], None, True),
        ([""], None, False),
        ([""], "k", False),  # --api-key "$UNSET"
    ],
)
def test_when_a_server_demands_a_key(
    given: list[str] | None, environment: str | None, demands: bool
) -> None:
    """As vLLM 0.32's middleware: ``[key for key in (args.api_key or [VLLM_API_KEY]) if key]``."""
    assert demands_key(given, environment) is demands


@pytest.mark.parametrize(
    ("method", "stale"),
    [
        ("mtp", True), ("eagle", True), ("eagle3", True), ("draft_model", True), ("medusa", True),
        ("mlp_speculator", True), ("custom_class", True), ("dflash", True),
        ("ngram", False), ("ngram_gpu", False), ("suffix", False), (None, False),
    ],
)  # fmt: skip
def test_drafts_that_keep_their_weights_are_told(method: str | None, stale: bool) -> None:
    speculative = None if method is None else SimpleNamespace(method=method)
    said = stale_drafts(SimpleNamespace(speculative_config=speculative))
    assert (f"speculative decoding ({method})" in said) is stale
    assert bool(said) is stale


def test_all_that_runs_in_vllm_logs_below_its_logger() -> None:
    """Which has a handler; what goes elsewhere comes bare, or not at all."""
    found = {}
    for path in sorted(Path(trainer_adapter.vllm.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                found[path.name] = ast.unparse(node.args[0])
    assert len(found) > 5
    assert set(found.values()) == {"'vllm.shardcast'"}, found


def test_when_running_requests_may_keep_their_cache() -> None:
    assert keep_refusal(GOOD, salting=True) == ""
    assert "SHARDCAST_SALT=1" in keep_refusal(GOOD, salting=False)
    assert "multi-modal" in keep_refusal(replace(GOOD, multimodal=True), salting=True)
    assert "Good" in keep_refusal(replace(GOOD, connector={"Good": True}), salting=True)


async def test_metrics() -> None:
    registry = CollectorRegistry()
    engine = FakeEngine()
    facts = Facts(engine_version="0.32.0", plugin_version="0.1.0")
    swapper = Swapper(engine, facts, FakeClock(), observer=SwapMetrics(registry))
    registry.register(StateCollector(swapper))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"shardcast_vllm_{name}", labels)

    assert (value("served_version"), value("nonfinite_state")) == (None, None)
    await swapper.boot()
    assert (value("served_version"), value("ready_state"), value("lag_versions")) == (1, 1, None)
    request = ActivateRequest(run="demo", version=2, digest=NEW.digest, path=NEW.path)
    engine.script["load"] = "poisoned"
    with pytest.raises(ShardcastError):
        await swapper.activate(request)
    assert value("served_version") is None
    assert (value("poisoned_state"), value("paused_state"), value("ready_state")) == (1, 1, 0)
    assert value("last_failure_timestamp_seconds", phase="load", code="failed") is not None
    assert value("activations_total", outcome="not_ready") == 1
    assert value("pause_seconds_count") == 0
    await swapper.activate(request)
    swapper.tell_newest(NewestRequest(run="demo", version=7))
    assert (value("served_version"), value("newest_version"), value("lag_versions")) == (2, 7, 5)
    assert value("last_failure_timestamp_seconds", phase="load", code="failed") is None
    assert value("activations_total", outcome="activated") == 1
    assert value("pause_seconds_count") == 1
    assert value("swaps_count") == 2
    assert value("nonfinite_state") == 0
    engine.published[NEXT.digest] = structs.replace(NEXT, nonfinite="w holds NaN at [3]")
    await swapper.activate(ActivateRequest(run="demo", version=3, digest=NEXT.digest, path="/3"))
    assert (value("served_version"), value("nonfinite_state")) == (3, 1)
    assert NEW.digest[:8].encode() not in generate_latest(registry)
