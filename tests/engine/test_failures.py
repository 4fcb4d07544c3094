"""Never half: whatever fails, and wherever, the old version answers as before under its label, or
the engine says that it is poisoned; and the next activation, a full load, recovers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoints import Out, change_config, save
from tests.engine.conftest import Start
from tests.engine.engines import Answers, EngineRaisedError, RunningEngine
from trainer_adapter.vllm.ranks import Report, Target, drop_command

Tensors = dict[str, torch.Tensor]


class Scene:
    """An engine that was booted from version 1, and what it must go on answering."""

    def __init__(self, out: Out, engine: RunningEngine, one: Target, two: Target) -> None:
        self.out, self.engine, self.one, self.two = out, engine, one, two
        engine.order("served")
        self.answers = engine.answers()
        self.label = engine.label()
        assert self.label == f"policy/{one.version}/{one.digest}"

    def still_serves_one(self) -> None:
        state = self.engine.state()
        assert state.served == self.one
        assert state.poisoned == ""
        assert self.engine.answers() == self.answers
        assert self.engine.label() == self.label

    def file(self, target: Target) -> Path:
        return Path(target.path) / "model.safetensors"


@pytest.fixture(scope="module")
def cold_two(out: Out, start: Start) -> tuple[Target, Answers]:
    two = out.model("qwen2-tied", "bfloat16", 2)
    engine = start(two.path)
    answers = engine.answers()
    engine.end()
    return two, answers


@pytest.fixture(scope="module")
def scene(out: Out, start: Start, cold_two: tuple[Target, Answers]) -> Scene:
    one = out.model("qwen2-tied", "bfloat16", 1)
    return Scene(out, start(out.current, load_format="shardcast"), one, cold_two[0])


@pytest.fixture
def good(scene: Scene) -> Path:
    return scene.out.scratch / "qwen2-tied-bfloat16-2"


@pytest.fixture
def fresh(scene: Scene) -> Target:
    """A version of its own, whose files a test may spoil."""
    return scene.out.publish(scene.out.scratch / "qwen2-tied-bfloat16-2", current=False)


# --- at stage --------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    _flip(other)
    os.replace(other, path)


def _remove(path: Path) -> None:
    path.unlink()


SPOIL = pytest.mark.parametrize("spoil", [_flip, _truncate, _replace, _remove])


@SPOIL
def test_bytes_that_are_not_the_published_ones_are_refused(
    scene: Scene, fresh: Target, spoil: Callable[[Path], None]
) -> None:
    spoil(scene.file(fresh))

    report = scene.engine.stage(fresh)

    assert report.staged is None
    assert report.failed is not None
    assert report.failed.code == ("unavailable" if spoil is _remove else "integrity")
    assert "model.safetensors" in report.failed.message
    assert scene.engine.activate(fresh).outcome == "refused"
    scene.still_serves_one()


@SPOIL
def test_bytes_that_change_after_they_were_staged_are_not_loaded(
    scene: Scene, fresh: Target, spoil: Callable[[Path], None]
) -> None:
    assert scene.engine.stage(fresh).staged == fresh
    spoil(scene.file(fresh))

    assert scene.engine.state().staged is None
    report = scene.engine.activate(fresh)

    assert (report.outcome, report.code) == ("refused", "unavailable")
    assert "stage it again" in report.message
    scene.still_serves_one()


def test_what_is_staged_or_served_cannot_be_evicted(scene: Scene, fresh: Target) -> None:
    assert scene.engine.stage(fresh).staged == fresh
    assert not scene.out.run.evict(fresh.version)
    scene.out.run.switch_current(fresh.version)
    assert not scene.out.run.evict(scene.one.version)
    scene.out.run.switch_current(scene.one.version)

    scene.engine.tell(drop_command())

    assert scene.out.run.evict(fresh.version)
    report = scene.engine.stage(fresh)
    assert report.failed is not None
    assert report.failed.code == "unavailable"
    scene.still_serves_one()


def test_a_digest_of_another_version_is_refused(scene: Scene, fresh: Target) -> None:
    import msgspec

    report = scene.engine.stage(msgspec.structs.replace(fresh, version=fresh.version + 1))
    assert report.failed is not None
    assert report.failed.code == "conflict"
    report = scene.engine.stage(msgspec.structs.replace(fresh, digest="0" * 64))
    assert report.failed is not None
    assert report.failed.code == "unavailable"
    scene.still_serves_one()


Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def _without(name: str) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        del tensors[name]

    return work


def _with(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        tensors[name] = tensor.contiguous()

    return work


@pytest.mark.parametrize(
    ("name", "work", "said"),
    [
        ("no-q", _without(Q), ["layers.1.self_attn.qkv_proj.weight", "missing"]),
        ("no-q-bias", _without("model.layers.1.self_attn.q_proj.bias"), ["qkv_proj.bias"]),
        ("no-gate", _without(GATE), ["layers.0.mlp.gate_up_proj.weight", "missing"]),
        ("no-norm", _without(NORM), [NORM]),
        ("no-embedding", _without("model.embed_tokens.weight"), ["embed_tokens.weight"]),
        ("small-q", _with(Q, torch.zeros(64, 128, dtype=torch.bfloat16)), [Q, "[64, 128]"]),
        ("large-q", _with(Q, torch.zeros(256, 128, dtype=torch.bfloat16)), [Q, "[256, 128]"]),
        ("flat-q", _with(Q, torch.zeros(128 * 128, dtype=torch.bfloat16)), [Q]),
        ("short-norm", _with(NORM, torch.zeros(64, dtype=torch.bfloat16)), [NORM, "[64]"]),
        ("int-q", _with(Q, torch.zeros(128, 128, dtype=torch.int32)), [Q, "int32", "bfloat16"]),
        ("fp8-q", _with(Q, torch.zeros(128, 128, dtype=torch.float8_e4m3fn)), [Q, "float8"]),
        ("unknown", _with("model.layers.1.extra.weight", torch.zeros(8)), ["extra"]),
        (
            "a-layer-more",
            _with("model.layers.2.mlp.down_proj.weight", torch.zeros(8)),
            ["layers.2"],
        ),
        (
            "untied",
            _with("lm_head.weight", torch.ones(384, 128, dtype=torch.bfloat16)),
            ["lm_head"],
        ),
    ],
)
def test_a_version_that_does_not_fit_the_model_is_refused_before_it_is_touched(
    scene: Scene, good: Path, name: str, work: Callable[[Tensors], None], said: list[str]
) -> None:
    report = scene.engine.stage(scene.out.broken(good, name, work))

    assert report.failed is not None
    assert report.failed.code == "incompatible"
    for word in said:
        assert word in report.failed.message
    scene.still_serves_one()


@pytest.fixture
def unjudged(scene: Scene) -> Iterator[None]:
    """The model's loaders look at the data, so that a dry run cannot tell."""
    scene.engine.judge(False)
    yield
    scene.engine.judge(True)


@pytest.mark.usefixtures("unjudged")
@pytest.mark.parametrize(
    ("name", "work", "said"),
    [
        ("unjudged-no-q", _without(Q), f"{Q} is missing"),
        ("unjudged-no-norm", _without(NORM), f"{NORM} is missing"),
        (
            "unjudged-small-q",
            _with(Q, torch.zeros(64, 128, dtype=torch.bfloat16)),
            f"{Q} is bfloat16 [64, 128] instead of bfloat16 [128, 128]",
        ),
        ("unjudged-more", _with("model.layers.1.extra.weight", torch.zeros(8)), "is more than"),
    ],
)
def test_where_a_dry_run_cannot_tell_the_tensors_must_be_those_of_the_start(
    scene: Scene, good: Path, name: str, work: Callable[[Tensors], None], said: str
) -> None:
    report = scene.engine.stage(scene.out.broken(good, name, work))

    assert report.failed is not None
    assert report.failed.code == "incompatible"
    assert said in report.failed.message
    scene.still_serves_one()


@pytest.mark.usefixtures("unjudged")
def test_where_a_dry_run_cannot_tell_a_whole_version_is_loaded(
    scene: Scene, cold_two: tuple[Target, Answers]
) -> None:
    assert scene.engine.swap(scene.two).outcome == "activated"
    assert scene.engine.answers() == cold_two[1]
    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.still_serves_one()


def test_a_head_that_equals_the_embeddings_may_be_there(
    scene: Scene, good: Path, cold_two: tuple[Target, Answers]
) -> None:
    def work(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert scene.engine.swap(scene.out.broken(good, "doubled", work)).outcome == "activated"
    assert scene.engine.answers() == cold_two[1]
    scene.engine.swap(scene.one)
    assert scene.engine.answers() == scene.answers


def test_another_configuration_needs_a_restart(scene: Scene, good: Path) -> None:
    directory = scene.out.scratch / "other-config"
    shutil.copytree(good, directory)
    change_config(directory, rms_norm_eps=0.01)

    report = scene.engine.stage(scene.out.publish(directory, current=False))

    assert report.failed is not None
    assert report.failed.code == "incompatible"
    assert "rms_norm_eps" in report.failed.message
    assert "restart" in report.failed.message
    scene.still_serves_one()


def _older_spelling(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types")
    path.write_text(json.dumps({**config, "rope_theta": rope["rope_theta"]}))


def _other_padding(directory: Path) -> None:
    change_config(directory, pad_token_id=5)


@pytest.mark.parametrize("change", [_older_spelling, _other_padding])
def test_the_same_configuration_may_be_written_differently(
    scene: Scene, good: Path, cold_two: tuple[Target, Answers], change: Callable[[Path], None]
) -> None:
    directory = scene.out.scratch / change.__name__
    shutil.copytree(good, directory)
    change(directory)

    report = scene.engine.swap(scene.out.publish(directory, current=False))

    assert report.outcome == "activated"
    assert scene.engine.answers() == cold_two[1]
    scene.engine.swap(scene.one)
    scene.still_serves_one()


def test_a_version_with_other_defaults_for_sampling_is_told_of(scene: Scene, good: Path) -> None:
    directory = scene.out.scratch / "other-defaults"
    shutil.copytree(good, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.3}))
    target = scene.out.publish(directory, current=False)

    assert scene.engine.swap(target).outcome == "activated"

    told = f"version {target.version} comes with another generation_config.json: the engine keeps"
    assert told in scene.engine.log.read_text()
    scene.engine.swap(scene.one)
    scene.still_serves_one()


def test_a_directory_without_weights_is_refused(scene: Scene) -> None:
    directory = scene.out.scratch / "empty"
    directory.mkdir()
    (directory / "config.json").write_text("{}")

    report = scene.engine.stage(scene.out.publish(directory, current=False))

    assert report.failed is not None
    assert report.failed.code == "incompatible"
    scene.still_serves_one()


# --- while it is loaded ----------------------------------------------------------------------

PLACES = pytest.mark.parametrize(
    ("place", "after"),
    [("tensors", 0), ("tensors", 7), ("tensors", 20), ("process", 0), ("process", 5), ("end", 0)],
)


def _restored(report: Report) -> None:
    assert (report.outcome, report.code, report.phase) == ("restored", "failed", "load")
    assert "injected" in report.message
    assert report.poisoned == ""


AHEAD = pytest.mark.parametrize("ahead", [True, False], ids=["prepared", "in-the-pause"])


def test_the_log_says_whether_a_version_was_prepared(scene: Scene) -> None:
    for ahead, said in [(True, "is prepared"), (False, "as a whole: preparing is turned off")]:
        scene.engine.prepare_ahead(ahead)
        scene.engine.tell(drop_command())
        before = len(scene.engine.log.read_text())
        assert scene.engine.stage(scene.two).staged == scene.two
        log = scene.engine.log.read_text()[before:]
        assert f"version {scene.two.version}" in log
        assert said in log
    scene.engine.prepare_ahead(True)


@AHEAD
@PLACES
def test_what_breaks_off_is_undone(
    scene: Scene, cold_two: tuple[Target, Answers], place: str, after: int, ahead: bool
) -> None:
    scene.engine.prepare_ahead(ahead)
    assert scene.engine.stage(scene.two).staged == scene.two
    scene.engine.arm(place, after=after)

    _restored(scene.engine.activate(scene.two))
    scene.engine.order("reset")

    scene.still_serves_one()
    assert scene.engine.swap(scene.two).outcome == "activated"
    assert scene.engine.answers() == cold_two[1]
    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.still_serves_one()


@AHEAD
@PLACES
def test_what_cannot_be_undone_is_poisoned_and_the_next_full_load_recovers(
    scene: Scene, cold_two: tuple[Target, Answers], place: str, after: int, ahead: bool
) -> None:
    scene.engine.prepare_ahead(ahead)
    assert scene.engine.stage(scene.two).staged == scene.two
    scene.engine.arm(place, after=after, times=2)

    report = scene.engine.activate(scene.two)

    assert (report.outcome, report.served) == ("poisoned", None)
    assert "activate a version again" in report.poisoned
    assert scene.engine.state().served is None
    assert scene.engine.swap(scene.two).outcome == "activated"
    assert scene.engine.answers() == cold_two[1]
    scene.engine.swap(scene.one)
    scene.still_serves_one()


def test_what_somebody_else_s_reload_has_left_is_loaded_as_a_whole(
    scene: Scene, cold_two: tuple[Target, Answers]
) -> None:
    """What was prepared would go into tensors that are not the model's any more."""
    scene.engine.prepare_ahead(True)
    assert scene.engine.stage(scene.two).staged == scene.two
    scene.engine.order("rpc", method="begin_reload")

    assert scene.engine.activate(scene.two).outcome == "activated"
    scene.engine.order("reset")

    assert scene.engine.answers() == cold_two[1]
    assert scene.engine.swap(scene.one).outcome == "activated"
    scene.still_serves_one()


def test_a_load_of_no_tensors_is_no_load(scene: Scene) -> None:
    assert scene.engine.order("rpc", method="load_nothing") == ["there is no tensor to load"]
    scene.still_serves_one()


def test_in_process_the_error_says_what_is_served(scene: Scene) -> None:
    scene.engine.arm("tensors", after=3)
    with pytest.raises(EngineRaisedError, match=f"version {scene.one.version} was loaded again"):
        scene.engine.swap(scene.two)
    scene.still_serves_one()


def test_the_file_of_what_is_served_may_be_spoilt_while_another_is_loaded(
    out: Out, start: Start, cold_two: tuple[Target, Answers]
) -> None:
    one = out.publish(save("qwen2-tied", "bfloat16", 1, out.scratch / "spoilt-one"))
    engine = start(out.current, load_format="shardcast")
    engine.stage(cold_two[0])
    _flip(Path(one.path) / "model.safetensors")
    engine.arm("tensors", after=9)

    report = engine.activate(cold_two[0])

    assert report.outcome == "poisoned"
    assert "shard" in report.message
    assert engine.swap(cold_two[0]).outcome == "activated"
    assert engine.answers() == cold_two[1]


def test_an_engine_that_was_booted_from_elsewhere_has_nothing_to_go_back_to(
    out: Out, start: Start, cold_two: tuple[Target, Answers]
) -> None:
    one = save("qwen2-tied", "bfloat16", 21, out.scratch / "elsewhere")
    engine = start(one)
    engine.stage(cold_two[0])
    engine.arm("tensors", after=9)

    report = engine.activate(cold_two[0])

    assert report.outcome == "poisoned"
    assert "booted from elsewhere" in report.message
    assert engine.swap(cold_two[0]).outcome == "activated"
    assert engine.answers() == cold_two[1]
