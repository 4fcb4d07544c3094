"""Versions of a small model in a worker's OUT, published by our own publisher."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.made import signer
from tests.models import make_model, write_model
from trainer_adapter.vllm.ranks import Target


def publish(
    scratch: Path, seed: int, *, files: Mapping[str, bytes] | None = None, weights: bool = True,
    step: int | None = None,
) -> Target:  # fmt: skip
    """Publish a model, with more files or none of its own."""
    source = scratch / f"source-{seed}"
    source.mkdir()
    if weights:
        write_model(source / "model.safetensors", make_model(seed, 150_000, 2))
        (source / "config.json").write_text(json.dumps({"seed": seed}))
    for name, data in (files or {}).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    run = RunStore(scratch / "out", "policy")
    options = PublishOptions(source=source, threads=1, delta=False, keep=16, step=step)
    done = publish_directory(options, run, [signer()], lambda: 10**12 + seed)
    run.switch_current(done.ref.version)
    return Target(
        run="policy",
        version=done.ref.version,
        digest=done.ref.manifest,
        path=str(run.version_directory(done.ref.version)),
        step=done.ref.step,
    )
