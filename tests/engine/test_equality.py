"""A swapped version answers as an engine that was started with it: tokens, and every bit of the
log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start
from tests.engine.engines import RunningEngine

KINDS = [
    ("qwen2", "bfloat16"),
    ("qwen2", "float32"),
    ("qwen2-tied", "bfloat16"),
    ("qwen2-tied", "float32"),
    ("qwen3-tied", "bfloat16"),
    ("llama", "bfloat16"),
    ("qwen3-moe", "bfloat16"),
    ("qwen3-moe", "float32"),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_swap_there_and_back_equals_cold_starts(
    kind: str,
    dtype: str,
    out: Out,
    start: Start,
    note_path: Callable[[str, RunningEngine], None],
) -> None:
    one, two = (out.model(kind, dtype, seed) for seed in (1, 2))
    again = [out.publish(out.scratch / f"{kind}-{dtype}-1") for _ in range(3)]
    first, second = (start(target.path, dtype=dtype) for target in (one, two))
    try:
        cold_one, cold_two = first.answers(), second.answers()
        note_path(f"{kind} {dtype}", first)
        assert ("experts" in " ".join(first.state().gemm)) == ("moe" in kind)
        assert cold_one != cold_two

        assert first.swap(two).outcome == "activated"
        assert first.answers() == cold_two
        for target in (one, *again):  # versions of equal bytes: each is loaded over the one before
            assert first.swap(target).outcome == "activated"
            assert first.answers() == cold_one
        assert second.swap(one).outcome == "activated"
        assert second.answers() == cold_one
    finally:
        first.end()
        second.end()


def test_the_label_says_run_version_and_digest(out: Out, start: Start) -> None:
    one = out.model("qwen2", "bfloat16", 11)
    engine = start(one.path)
    assert engine.label() == "default"
    assert engine.state().served is None

    engine.swap(one)

    assert engine.label() == f"policy/{one.version}/{one.digest}"
    assert engine.state().served == one


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3-moe"])
def test_a_swap_of_a_compiled_engine_equals_cold_starts(
    kind: str,
    out: Out,
    start: Start,
    note_path: Callable[[str, RunningEngine], None],
) -> None:
    """Its graph is compiled once, and finds the weights where they were (fp32: test_boot)."""
    one, two = (out.model(kind, "bfloat16", seed) for seed in (1, 2))
    first, second = (start(target.path, enforce_eager=False) for target in (one, two))
    try:
        cold_one, cold_two = first.answers(), second.answers()
        note_path(f"{kind} bfloat16 compiled", first)
        assert cold_one != cold_two

        for target, cold in ((two, cold_two), (one, cold_one), (two, cold_two)):
            assert first.swap(target).outcome == "activated"
            assert first.answers() == cold
    finally:
        first.end()
        second.end()


def test_versions_may_be_skipped(out: Out, start: Start) -> None:
    """Those between are there, and were never staged."""
    run = [out.model("qwen2-tied", "bfloat16", seed) for seed in range(21, 26)]
    assert run[-1].version == run[0].version + 4
    engine, reference = start(run[0].path), start(run[-1].path)
    cold_first, cold_last = engine.answers(), reference.answers()
    reference.end()

    assert engine.swap(run[-1]).outcome == "activated"
    assert engine.answers() == cold_last
    assert engine.swap(run[-1]).outcome == "already"
    assert engine.swap(run[0]).outcome == "activated"
    assert engine.answers() == cold_first
    engine.end()


def test_weights_of_another_float_type_are_converted_as_a_cold_start_does(
    out: Out, start: Start
) -> None:
    wide = out.model("qwen2", "float32", 6)
    narrow = out.model("qwen2", "bfloat16", 7)
    cold = start(wide.path, dtype="bfloat16").answers()
    engine = start(narrow.path, dtype="bfloat16")

    engine.swap(wide)

    assert engine.answers() == cold


def test_an_own_road_of_vllm_works_as_well(out: Out, start: Start) -> None:
    one, two = (out.model("qwen2", "bfloat16", seed) for seed in (8, 9))
    engine = start(one.path)
    cold = start(two.path).answers()

    import msgspec

    engine.order("native", target=msgspec.to_builtins(two))

    assert engine.label() == "native"
    assert engine.answers() == cold


@pytest.mark.parametrize("ahead", [True, False], ids=["prepared", "in-the-pause"])
def test_a_swap_gives_back_what_it_took(out: Out, start: Start, ahead: bool) -> None:
    """The memory that is nobody's file grows by a second copy while a version is prepared, and by a
    few layers where it is not."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    one, two = (out.model("llama", "bfloat16", seed, **sizes) for seed in (12, 13))
    weights = sum(
        file.stat().st_size for file in out.run.version_directory(one.version).glob("*.safetensors")
    )
    engine = start(one.path)
    engine.prepare_ahead(ahead)
    engine.answers()
    engine.swap(two)
    _settle(engine)
    engine.order("rpc", method="watch_memory")

    for target in (one, two, one, two):
        engine.swap(target)

    memory = _memory(engine)
    assert weights > 100_000_000
    if not ahead:
        assert memory["highest"] - memory["before"] < 0.6 * weights
        return
    assert 0.8 * weights < memory["highest"] - memory["before"] < 2.3 * weights
    _wait_until(lambda: _memory(engine)["now"] - memory["before"] < 0.3 * weights)


def _settle(engine: RunningEngine) -> None:
    """Wait until its memory no longer falls: a thread gives back what a swap leaves."""
    deadline = time.monotonic() + 20
    before, now = 1 << 62, _memory(engine)["now"]
    while now < before - (1 << 20):
        assert time.monotonic() < deadline
        time.sleep(0.5)
        before, now = now, _memory(engine)["now"]


def _memory(engine: RunningEngine) -> dict[str, int]:
    (memory,) = engine.order("rpc", method="memory")
    return memory  # type: ignore[no-any-return]


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
