"""What `publish` looks at on request: tensors that are no numbers, canaries."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from shardcast.canary import METADATA_KEY, Canary, Prompt, canary_in
from shardcast.store.run import RunStore
from tests.unit.cli.conftest import Cli
from tests.unit.safetensors import safetensors, write

GOOD = {"tolerance": 0.05, "prompts": [{"tokens": [1, 2, 3], "logprobs": [-0.5, -1.25]}]}
NAN_32 = struct.pack("<f", float("nan"))


def diverged(root: Path, data: bytes) -> Path:
    return write(
        root / "ckpt",
        {"config.json": b"{}", "model.safetensors": safetensors({"w": ("F32", [2], data)})},
    )


def test_publish_refuses_before_anything_is_announced(cli: Cli, tmp_path: Path) -> None:
    ckpt, store = diverged(tmp_path, b"\0" * 4 + NAN_32), tmp_path / "store"
    arguments = ("publish", ckpt, "--run", "policy", "--store", store, "--json")
    refused = cli(*arguments, "--refuse-nonfinite")
    assert refused.code == 10
    event = refused.event("error")
    assert event["code"] == "nonfinite"
    assert "'w'" in event["message"]
    assert not (store / "policy" / "head.json").exists()
    assert cli(*arguments).event("published")["version"] == 1
    diverged(tmp_path, b"\0" * 8)
    assert cli(*arguments, "--refuse-nonfinite").event("published")["version"] == 2


def test_a_file_becomes_metadata_of_the_version(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "canary.json"
    file.write_text(json.dumps(GOOD, indent=2))
    ran = cli("publish", checkpoint, "--store", tmp_path / "store", "--canary", file,
              "--metadata", "note=x", "--run", "policy")  # fmt: skip
    assert ran.code == 0, ran.stderr
    version = RunStore(tmp_path / "store" / "policy", "policy").load_state(1)
    assert version is not None
    assert set(version.layout.metadata) == {"note", METADATA_KEY}
    canary = canary_in(version.layout.metadata)
    assert canary == Canary(
        prompts=[Prompt(tokens=[1, 2, 3], logprobs=[-0.5, -1.25])], tolerance=0.05
    )


def test_a_bad_file_is_named_before_anything_is_published(
    cli: Cli, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "canary.json").write_text("{}")
    ran = cli("publish", checkpoint, "--store", tmp_path / "store", "--canary",
              tmp_path / "canary.json", "--json")  # fmt: skip
    assert ran.code == 10
    assert "canary.json" in ran.event("error")["source"]
    assert cli("publish", checkpoint, "--canary", tmp_path / "none", "--json").code == 2
    assert not (tmp_path / "store").exists()
