"""Which files are published."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from shardcast.errors import UnsafePathError, UsageError
from shardcast.sources import select_files


def make(root: Path, *paths: str, data: bytes = b"x") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def names(root: Path, **options: list[str]) -> list[str]:
    return [file.path for file in select_files(root, **options).files]


def test_weights_configuration_and_tokenizer_are_kept_in_any_layout(tmp_path: Path) -> None:
    paths = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "special_tokens_map.json",
        "tokenizer.model",
        "transformer/diffusion_pytorch_model.safetensors",
        "vocab.bin",
    ]
    make(tmp_path, *paths)
    assert names(tmp_path) == sorted(paths)


def test_training_state_pickles_and_caches_are_left_out_with_a_reason(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors")
    make(
        tmp_path,
        "optimizer.pt",
        "optimizer.bin",
        "optimizer_0/__0_0.distcp",
        "scheduler.pt",
        "rng_state_3.pth",
        "random_states_0.pkl",
        "global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "training_args.bin",
        "extra.pkl",
        ".git/HEAD",
        ".cache/huggingface/download/model.safetensors.metadata",
        "model.safetensors.tmp",
    )
    make(tmp_path, "pytorch_model.bin", data=b"PK\x03\x04rest")
    make(tmp_path, "old_model.bin", data=pickle.dumps({"a": 1}))
    found = select_files(tmp_path)
    assert [file.path for file in found.files] == ["model.safetensors"]
    reasons = {file.path: file.reason for file in found.left_out}
    assert reasons["optimizer.pt"] == "optimizer, scheduler or RNG state"
    assert reasons["pytorch_model.bin"] == "pickle"
    assert reasons["old_model.bin"] == "pickle"
    assert reasons["extra.pkl"] == "pickle"
    assert reasons[".git/HEAD"] == "cache or temporary file"
    assert len(reasons) == 14


def test_include_wins_over_the_defaults_and_exclude_over_both(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors", "optimizer.pt", "a/scheduler.pt", "b.json")
    assert names(tmp_path, include=["*.pt"]) == [
        "a/scheduler.pt",
        "b.json",
        "model.safetensors",
        "optimizer.pt",
    ]
    assert names(tmp_path, include=["*.pt"], exclude=["a/*", "*.json"]) == [
        "model.safetensors",
        "optimizer.pt",
    ]


def test_links_to_files_and_directories_are_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    make(outside, "deep/a.json", "b.json")
    make(root, "c.json")
    (root / "linked").symlink_to(outside)
    (root / "b.json").symlink_to("../outside/b.json")
    assert names(root) == ["b.json", "c.json", "linked/b.json", "linked/deep/a.json"]


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "a.json")
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="loop"):
        select_files(tmp_path)


def test_a_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    make(tmp_path, "a.json")
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(UsageError, match=r"model\.safetensors points to \.\./blobs/gone"):
        select_files(tmp_path)


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a.json")
    os.mkfifo(tmp_path / "pipe")
    found = select_files(tmp_path)
    assert [(file.path, file.reason) for file in found.left_out] == [("pipe", "not a regular file")]


@pytest.mark.parametrize("name", ["a:b.json", "con.json", "dot.", "back\\slash", "line\nbreak"])
def test_names_that_are_not_portable_are_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    with pytest.raises(UnsafePathError):
        select_files(tmp_path)


def test_names_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "Model.safetensors", "model.safetensors")
    with pytest.raises(UnsafePathError, match="only in case"):
        select_files(tmp_path)


def test_a_directory_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        select_files(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no file to publish"):
        select_files(tmp_path)
    make(tmp_path, "optimizer.pt")
    with pytest.raises(UsageError, match="1 left out: optimizer"):
        select_files(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        select_files(tmp_path / "optimizer.pt")


def test_files_that_may_hold_a_secret_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a.json", "shardcast.key", "new.key.rotation", "sub/tls.pem", ".env")
    make(tmp_path, "shardcast.pub")
    assert names(tmp_path) == ["a.json", "shardcast.pub"]
    assert names(tmp_path, include=["tls.pem"]) == ["a.json", "shardcast.pub", "sub/tls.pem"]


def test_what_is_left_out_may_be_broken_or_loop(tmp_path: Path) -> None:
    make(tmp_path, "a.json", "old/b.json")
    (tmp_path / "gone.json").symlink_to("nowhere")
    (tmp_path / "optimizer.pt").symlink_to("nowhere")
    (tmp_path / "again").symlink_to(tmp_path)
    found = select_files(tmp_path, exclude=["gone.json", "again", "old"])
    assert [file.path for file in found.files] == ["a.json"]
    assert {file.path for file in found.left_out} == {"again", "gone.json", "old", "optimizer.pt"}
