"""``AsyncLLM`` in a program of one's own: a swap in the middle of a request."""

from __future__ import annotations

from tests.engine.checkpoints import Out
from tests.engine.conftest import Start


def test_a_request_goes_on_over_a_swap_and_loses_nothing(out: Out, start: Start) -> None:
    one, two = (out.model("qwen2-tied", "bfloat16", seed) for seed in (1, 2))
    cold_two = start(two.path).answers(alone=True)
    out.run.switch_current(one.version)
    engine = start(out.current, load_format="shardcast", kind="async")
    import msgspec

    told = engine.order("over_a_swap", target=msgspec.to_builtins(two), tokens=80)

    assert told["booted"] == f"policy/{one.version}/{one.digest}"
    assert told["label"] == f"policy/{two.version}/{two.digest}"
    assert len(told["tokens"]) == 80
    assert [span["version"] for span in told["spans"]] == [told["booted"], told["label"]]
    assert 0 < told["pause_ms"] < 60_000
    assert "cache_salt" in told["kept"]
    assert told["keep_allowed"] == [False, True]
    assert engine.answers() == cold_two
