"""``LLM`` in a program of one's own: whatever fails, no token is made of unknown weights, or mislabelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from shardcast.engine.forms import Identity, label_of
from shardcast.errors import EngineError, EngineRefusedError, EngineUncertainError
from tests.unit.swapping.engine import ELSEWHERE, NEW, NEXT, OLD
from trainer_adapter.vllm.inprocess import attach, served, swap
from trainer_adapter.vllm.machine import SwapError
from trainer_adapter.vllm.ranks import (
    Outcome,
    Progress,
    RankFailure,
    RankReply,
    Target,
    read_command,
    write_reply,
)


def label(target: Target) -> str:
    return label_of(Identity(target.run, target.version, target.digest))


def config(**changed: Any) -> SimpleNamespace:
    """vLLM's configuration, as far as it is looked at."""
    parts: dict[str, Any] = {
        "weight_transfer_config": SimpleNamespace(backend="shardcast"),
        "parallel_config": SimpleNamespace(data_parallel_size=1),
        "model_config": SimpleNamespace(is_multimodal_model=False, enable_sleep_mode=False),
        "lora_config": None,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**parts, **changed})


class FakeCore:
    """``LLMEngine``: takes requests, has caches."""

    def __init__(self) -> None:
        self.vllm_config = config()
        self.requests: list[str] = []
        self.unfinished = self.sleeping = False
        self.log: list[str] = []

    def has_unfinished_requests(self) -> bool:
        return self.unfinished

    def is_sleeping(self) -> bool:
        return self.sleeping

    def add_request(self, request: str) -> None:
        self.requests.append(request)

    def reset_mm_cache(self) -> None:
        self.log.append("mm")

    def reset_encoder_cache(self) -> None:
        self.log.append("encoder")


class FakeLlm:
    """``LLM`` on one rank. ``script`` says how the next loads end."""

    def __init__(self, loaded: Target | None = OLD, *script: str) -> None:
        self.llm_engine = FakeCore()
        self.ranks = RankReply(rank=0, served=loaded)
        self.weights: Target | None = loaded or ELSEWHERE
        self.script = list(script)
        self.label = "default" if loaded is None else label(loaded)
        self.polls = 2
        self.resets: bool | Exception = True

    # --- what a user's program does ------------------------------------------------------------

    def generate(self) -> tuple[Target, str]:
        """Return which weights answered, and under which label."""
        self.llm_engine.add_request("why?")
        assert self.weights is not None, "half-loaded weights have answered"
        return self.weights, self.label

    # --- what vLLM has ---------------------------------------------------------------------------

    def get_weight_version(self) -> str:
        return self.label

    def update_weight_version(self, new: str) -> None:
        self.label = new

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.llm_engine.log.append(f"prefixes, connector: {reset_connector}")
        if isinstance(self.resets, Exception):
            raise self.resets
        return self.resets

    def collective_rpc(self, method: str, args: tuple[Any]) -> list[dict[str, Any]]:
        assert method == "shardcast"
        told = read_command(args[0])
        reply = self.ranks
        if told.op == "stage" and told.target is not None:
            self.stage(told.target)
            reply = self.ranks
        elif told.op == "state" and self.ranks.staging is not None:
            self.polls -= 1
            if self.polls <= 0:
                self.ranks = replace(self.ranks, staged=self.wanted, staging=None)
            reply = self.ranks
        elif told.op == "activate" and told.target is not None:
            reply = self.load(told.target)
        return [write_reply(reply)]

    def stage(self, target: Target) -> None:
        if self.script[:1] == ["integrity"]:
            self.script.pop(0)
            failed = RankFailure(
                digest=target.digest, version=target.version, code="integrity", message="not those"
            )
            self.ranks = replace(self.ranks, failed=failed, staged=None)
        elif self.ranks.served != target:
            self.wanted = target
            staging = Progress(digest=target.digest, done=0, bytes=10)
            self.ranks = replace(self.ranks, staging=staging, staged=None, failed=None)

    def load(self, target: Target) -> RankReply:
        self.llm_engine.log.append("load")
        assert self.label == "unknown", "weights are loaded under a label"
        with pytest.raises(EngineError):
            self.llm_engine.add_request("now?")
        assert self.ranks.staged == target
        what = self.script.pop(0) if self.script else "activated"
        if what == "lost before":
            raise RuntimeError("no answer")
        outcome: Outcome = "activated"
        if what in ("refused", "restored"):
            outcome = "refused" if what == "refused" else "restored"
            return replace(self.ranks, outcome=outcome, code="failed", message="said why")
        if what == "poisoned":
            self.weights = None
            self.ranks = replace(self.ranks, served=None, staged=None, poisoned="half: do this")
            return replace(self.ranks, outcome="poisoned", code="failed", message="half")
        self.weights = target
        self.ranks = replace(self.ranks, served=target, staged=None, poisoned="")
        if what == "lost after":
            raise RuntimeError("no answer")
        return replace(self.ranks, outcome=outcome)


def take(llm: FakeLlm, target: Target) -> str:
    return swap(llm, target, sleep=lambda _: None).outcome


def test_a_swap() -> None:
    llm = FakeLlm()
    assert take(llm, NEW) == "activated"
    assert llm.generate() == (NEW, label(NEW))
    assert take(llm, NEW) == "already"
    assert llm.generate() == (NEW, label(NEW))


def test_the_caches_are_forgotten_before_the_load_and_the_connector_s_too() -> None:
    llm = FakeLlm()
    take(llm, NEW)
    assert llm.llm_engine.log == ["prefixes, connector: True", "mm", "encoder", "load"]


@pytest.mark.parametrize("resets", [False, RuntimeError("it waits for a transfer")])
def test_caches_that_cannot_be_forgotten_leave_all_as_it_was(resets: Any) -> None:
    llm = FakeLlm()
    llm.resets = resets
    for _ in range(2):  # never a success that is none
        with pytest.raises(EngineRefusedError, match="swap again") as caught:
            take(llm, NEW)
        assert caught.value.phase == "pause"
        assert llm.generate() == (OLD, label(OLD))
    llm.resets = True
    assert take(llm, NEW) == "activated"
    assert llm.generate() == (NEW, label(NEW))


@pytest.mark.parametrize("loaded", [OLD, None])
@pytest.mark.parametrize("said", ["refused", "restored"])
def test_what_is_not_taken_over_leaves_the_old_version_and_its_label(
    said: str, loaded: Target | None
) -> None:
    llm = FakeLlm(loaded, said)
    before = llm.generate()
    with pytest.raises(EngineRefusedError, match="said why"):
        take(llm, NEW)
    assert llm.generate() == before


def test_poisoned_weights_answer_nobody_until_a_swap_succeeds() -> None:
    llm = FakeLlm(OLD, "poisoned", "refused", "integrity")
    for kind in (EngineError, EngineError, EngineRefusedError):  # refused: still poisoned
        with pytest.raises(kind):
            take(llm, NEW)
        assert llm.label == "unknown"
        with pytest.raises(EngineError, match="half: do this"):
            llm.generate()
        with pytest.raises(EngineError, match="half: do this"):
            served(llm)
    assert llm.llm_engine.requests == []
    assert take(llm, NEW) == "activated"
    assert llm.generate() == (NEW, label(NEW))


@pytest.mark.parametrize("lost", ["lost before", "lost after"])
@pytest.mark.parametrize("then", [NEW, NEXT])
def test_a_lost_answer_is_resolved_by_the_next_swap(lost: str, then: Target) -> None:
    llm = FakeLlm(OLD, lost)
    with pytest.raises(EngineUncertainError, match="nobody knows whether version 2 is loaded"):
        take(llm, NEW)
    assert llm.label == "unknown"
    with pytest.raises(EngineError, match="swap again"):
        llm.generate()
    take(llm, then)
    assert llm.generate() == (then, label(then))


def test_asking_resolves_a_lost_answer_as_well() -> None:
    llm = FakeLlm(OLD, "lost after")
    with pytest.raises(EngineUncertainError):
        take(llm, NEW)
    assert served(llm) == NEW
    assert llm.generate() == (NEW, label(NEW))


def test_an_interruption_leaves_it_shut() -> None:
    llm = FakeLlm(OLD)

    def interrupted(target: Target) -> RankReply:
        raise KeyboardInterrupt

    real, llm.load = llm.load, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        take(llm, NEW)
    with pytest.raises(EngineError, match="swap again"):
        llm.generate()
    llm.load = real  # type: ignore[method-assign]
    take(llm, NEW)
    assert llm.generate() == (NEW, label(NEW))


def test_a_failure_of_another_version_is_none_of_this_one() -> None:
    llm = FakeLlm(OLD, "integrity")
    with pytest.raises(EngineRefusedError, match="not those") as caught:
        take(llm, NEW)
    assert (caught.value.phase, caught.value.reason) == ("stage", "integrity")
    assert take(llm, OLD) == "already"
    assert take(llm, NEXT) == "activated"


def test_engines_that_may_not_be_touched_now() -> None:
    llm = FakeLlm()
    llm.llm_engine.unfinished = True
    with pytest.raises(EngineRefusedError, match="requests are running"):
        take(llm, NEW)
    llm.llm_engine.unfinished, llm.llm_engine.sleeping = False, True
    with pytest.raises(EngineRefusedError, match="wake_up"):
        take(llm, NEW)
    assert llm.llm_engine.log == []
    assert llm.weights == OLD


WRONG = pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight_transfer_config": None}, 'weight_transfer_config={"backend": "shardcast"}'),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "2 data-parallel engines"),
    ],
)


@WRONG
def test_an_llm_that_cannot_swap_is_told_why(changed: dict[str, Any], said: str) -> None:
    llm = FakeLlm()
    llm.llm_engine.vllm_config = config(**changed)
    for work in (served, lambda one: take(one, NEW)):
        with pytest.raises(EngineRefusedError) as caught:
            work(llm)
        assert said in str(caught.value)
        assert caught.value.reason == "unsupported"


@WRONG
async def test_so_is_an_engine_that_is_to_be_attached(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(SwapError) as caught:
        await attach(SimpleNamespace(vllm_config=config(**changed)))
    assert said in str(caught.value)
    assert caught.value.slug == "unsupported"


def test_plugins_that_leave_ours_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    with pytest.raises(EngineRefusedError, match="'shardcast' is not among"):
        served(FakeLlm())
