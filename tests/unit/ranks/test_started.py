"""What an engine was started with, and what a version may differ in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardcast.errors import EngineRefusedError
from tests.models import make_model, write_model
from tests.unit.ranks.versions import publish
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.started import Started, directory_of

CONFIG: Mapping[str, Any] = {"model_type": "somebodys-own", "layers": 2, "eos_token_id": 1}


def started(scratch: Path, config: Mapping[str, Any] = CONFIG, **files: str) -> Started:
    directory = scratch / "boot"
    directory.mkdir()
    write_model(directory / "model.safetensors", make_model(0, 150_000, 2))
    (directory / "config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / f"{name}.json").write_text(text)
    return Started.at(directory)


def opened(scratch: Path, config: Mapping[str, Any] = CONFIG, **files: str) -> Checkpoint:
    more = {f"{name}.json": text.encode() for name, text in files.items()}
    more["config.json"] = json.dumps(config).encode()
    target = publish(scratch, 1, files=more)
    checkpoint = Checkpoint(
        Path(target.path), run=target.run, version=target.version, digest=target.digest
    )
    checkpoint.verify()
    return checkpoint


@pytest.mark.parametrize(
    "new", [{}, {"transformers_version": "9.9"}, {"eos_token_id": 7}, {"dtype": "bfloat16"}]
)
def test_what_does_not_matter_to_a_model_may_differ(tmp_path: Path, new: dict[str, Any]) -> None:
    with opened(tmp_path, {**CONFIG, **new}) as checkpoint:
        started(tmp_path).check_config(checkpoint)


@pytest.mark.parametrize("new", [{"layers": 3}, {"rope_theta": 5.0}])
def test_another_configuration_is_refused(tmp_path: Path, new: dict[str, Any]) -> None:
    with (
        opened(tmp_path, {**CONFIG, **new}) as checkpoint,
        pytest.raises(EngineRefusedError, match=f"says {next(iter(new))} = .*restart"),
    ):
        started(tmp_path).check_config(checkpoint)


def test_the_tensors_of_the_start_are_compared_by_name_shape_and_type(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoint:
        whole = started(tmp_path)
        whole.check_forms(checkpoint, "nobody knows")
        assert whole.forms is not None
        name, form = next(iter(whole.forms.items()))
        others = dict(whole.forms)
        del others[name]
        for forms, said in [
            ({**whole.forms, "more": form}, "more is missing"),
            (others, f"{name} is more than it has"),
            ({**whole.forms, name: ("float64", form[1])}, f"{name} is .* instead of float64"),
            ({**whole.forms, name: (form[0], (1, 2))}, f"{name} is .* instead of .*1, 2"),
        ]:
            with pytest.raises(EngineRefusedError, match=f"nobody knows, so .*{said}"):
                Started(None, forms, {}).check_forms(checkpoint, "nobody knows")


def test_without_anything_to_compare_with_it_says_how_to_start_the_engine(tmp_path: Path) -> None:
    unknown = Started.at(None)
    with opened(tmp_path) as checkpoint:
        unknown.check_config(checkpoint)
        assert unknown.differing(checkpoint) == []
        with pytest.raises(EngineRefusedError, match="--load-format shardcast"):
            unknown.check_forms(checkpoint, "nobody knows")


@pytest.mark.parametrize("spoilt", ["cut", "gone", "index"])
def test_what_cannot_be_read_is_not_known(tmp_path: Path, spoilt: str) -> None:
    started(tmp_path)
    weights = tmp_path / "boot/model.safetensors"
    if spoilt == "cut":
        weights.write_bytes(b"123")
    else:
        weights.unlink()
    if spoilt == "index":
        (tmp_path / "boot/model.safetensors.index.json").write_text("[]")
    (tmp_path / "boot/config.json").write_text("{")
    again = Started.at(tmp_path / "boot")
    assert (again.config, again.forms) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ('{"a": 1}', '{"a": 1}', False),
        ('{"a": 1, "b": 2}', '{ "b": 2, "a": 1 }', False),
        ('{"a": 1, "transformers_version": "4"}', '{"a": 1, "transformers_version": "5"}', False),
        ('{"a": 1}', '{"a": 2}', True),
        ("[1]", "[2]", True),
        ('{"a": 1}', "{", True),
    ],
)
def test_files_that_vllm_reads_only_once_are_told_of(
    tmp_path: Path, old: str, new: str, differs: bool
) -> None:
    with opened(tmp_path, {**CONFIG, "eos_token_id": 5}, tokenizer=new, other=new) as checkpoint:
        found = started(tmp_path, tokenizer=old, other=old).differing(checkpoint)
    assert found == ["tokenizer.json"] * differs + ["config.json (eos_token_id)"]


def test_a_hubs_name_is_no_directory(tmp_path: Path) -> None:
    assert directory_of(str(tmp_path)) == tmp_path
    assert directory_of("nobody/has-this") is None
    assert directory_of("not a name \0".strip("\0")) is None
