"""Booting straight from a worker's OUT, following from there, and vLLM versions that we do not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.checkpoints import RUN, Out, save
from tests.engine.conftest import Start
from tests.engine.engines import EngineHost, EngineRaisedError, RunningEngine
from tests.engine.moving import moving
from tests.engine.test_failures import _flip
from tests.engine.writing import writing

COMPILED = {"enforce_eager": False, "dtype": "float32", "load_format": "shardcast"}


def _compile_keys(host: EngineHost) -> set[str]:
    """Return the names under which vLLM has put compiled models so far."""
    return {path.parent.parent.name for path in host.cache.glob("**/torch_aot_compile/*/*/model")}


def test_every_version_boots_from_one_name_and_has_one_compile_key(
    out: Out, start: Start, host: EngineHost, note_path: Callable[[str, RunningEngine], None]
) -> None:
    """vLLM 0.32 on CPUs finds the compiled model by its key, and fails to load it (a fault of its own:
    no ``finalize_loading``); inductor's cache below that saves most of the time. So the key is what
    can be tested here."""
    one = out.model("qwen2", "float32", 1)
    first = start(out.current, **COMPILED)
    cold_one = first.answers()
    assert first.state().served == one
    keys = _compile_keys(host)
    assert len(keys) == 1
    note_path("qwen2 float32 compiled", first)

    two = out.model("qwen2", "float32", 2)  # the worker has got the next one
    second = start(out.current, **COMPILED)
    cold_two = second.answers()
    assert second.state().served == two
    assert _compile_keys(host) == keys
    assert cold_one != cold_two

    compiled = first.order("compilations")
    assert compiled["vllm num_aot_compiles"] > 0
    assert compiled["stats unique_graphs"] > 0
    assert first.swap(two).outcome == "activated"
    assert first.answers() == cold_two
    assert first.swap(one).outcome == "activated"
    assert first.answers() == cold_one
    assert first.order("compilations") == compiled, "a swap has compiled something"


def test_a_version_is_pinned_whatever_becomes_current(out: Out, start: Start) -> None:
    """By its digest, or because it was current before vLLM read anything."""
    one, two = (out.model("qwen2-tied", "bfloat16", seed) for seed in (1, 2))
    pinned = start(
        out.current, load_format="shardcast", model_loader_extra_config={"digest": one.digest}
    )
    newest = start(out.current, load_format="shardcast")
    out.run.switch_current(one.version)
    moved = start(out.current, load_format="shardcast", **moving(out.current, two.version))

    assert out.current.resolve() == Path(two.path)
    assert newest.state().served == two
    cold = newest.answers()
    cold_one = pinned.answers()
    assert cold_one != cold
    for engine in (pinned, moved):
        assert engine.state().served == one
        assert engine.order("served") is not None
        assert engine.label() == f"{RUN}/{one.version}/{one.digest}"
        assert engine.answers() == cold_one
        assert engine.swap(two).outcome == "activated"
        assert engine.answers() == cold


def test_an_engine_that_starts_while_another_tokenizer_comes_says_so(
    out: Out, start: Start
) -> None:
    made = []
    for seed in (13, 14):
        directory = save("qwen2-tied", "bfloat16", seed, out.scratch / f"tokenizer-{seed}")
        (directory / "tokenizer.json").write_text(f'{{"of": {seed}}}')
        made.append(out.publish(directory))
    out.run.switch_current(made[0].version)

    said = f"has another tokenizer.json, .*start the engine again, or with --model {made[0].path}"
    with pytest.raises(EngineRaisedError, match=said):
        start(out.current, load_format="shardcast", **moving(out.current, made[1].version))


def test_what_was_not_published_is_not_booted(out: Out, start: Start) -> None:
    target = out.model("qwen2-tied", "bfloat16", 3)
    _flip(Path(target.path) / "model.safetensors")
    with pytest.raises(EngineRaisedError, match=r"model\.safetensors, shard \d+"):
        start(out.current, load_format="shardcast")


def test_a_file_that_is_written_to_while_it_is_loaded_is_not_booted(out: Out, start: Start) -> None:
    out.model("qwen2-tied", "bfloat16", 9)
    said = r"model\.safetensors was changed or replaced while it was loaded"
    with pytest.raises(EngineRaisedError, match=said):
        start(out.current, load_format="shardcast", **writing())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_loader_extra_config": {"digest": "0" * 64}}, "no version with manifest 0000"),
        ({"model_loader_extra_config": {"threads": 3}}, "only 'digest'"),
    ],
)
def test_wrong_options_are_named(
    out: Out, start: Start, options: dict[str, object], said: str
) -> None:
    out.model("qwen2-tied", "bfloat16", 4)
    with pytest.raises(EngineRaisedError, match=said):
        start(out.current, load_format="shardcast", **options)


def test_a_directory_that_no_worker_keeps_is_named(out: Out, start: Start) -> None:
    target = out.model("qwen2-tied", "bfloat16", 5)
    directory = out.scratch / "qwen2-tied-bfloat16-5"
    with pytest.raises(EngineRaisedError, match="give OUT/current"):
        start(directory, load_format="shardcast")
    assert start(target.path, load_format="shardcast").state().served == target


@pytest.mark.parametrize("options", [{}, {"load_format": "shardcast"}])
def test_an_unknown_vllm_is_refused_with_a_clear_message(
    out: Out, host: EngineHost, options: dict[str, object]
) -> None:
    out.model("qwen2-tied", "bfloat16", 6)
    with pytest.raises(EngineRaisedError, match=r"swaps weights in vLLM 0\.32\.x.*0\.99\.0"):
        host.start(out.current, **options, pretend={"version": "0.99.0"})


def test_a_vllm_that_lacks_what_we_use_is_refused_with_its_name(out: Out, host: EngineHost) -> None:
    out.model("qwen2-tied", "bfloat16", 7)
    with pytest.raises(EngineRaisedError, match=r"lacks .*layerwise:_place_kernel_tensors"):
        host.start(out.current, pretend={"without": "_place_kernel_tensors"})


def test_the_plug_in_may_be_registered_again_and_does_nothing_to_others(
    out: Out, start: Start
) -> None:
    target = out.model("qwen2-tied", "bfloat16", 8)
    engine = start(target.path, weight_transfer_config=None)
    engine.order("register_again")

    report = engine.state()

    assert (report.outcome, report.code) == ("refused", "unsupported")
    assert '{"backend": "shardcast"}' in report.message
    assert engine.answers()
