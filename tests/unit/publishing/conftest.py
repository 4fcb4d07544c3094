"""A checkpoint directory, a key and a store for tests that publish."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardcast import keys
from shardcast.protocol.envelope import Signer
from shardcast.store.run import RunStore
from shardcast.store.store import Store

START_MS = 1_800_000_000_000
KIB = 1024


class Clock:
    """Unix milliseconds that move only when told to (and by one a call)."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        self.now += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    root = tmp_path / "ckpt"
    (root / "tokenizer").mkdir(parents=True)
    (root / "model-00001-of-00002.safetensors").write_bytes(os.urandom(700 * KIB))
    (root / "model-00002-of-00002.safetensors").write_bytes(os.urandom(256 * KIB))
    (root / "config.json").write_text(json.dumps({"model_type": "test"}))
    (root / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (root / "empty.txt").write_bytes(b"")
    return root


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return keys.load_signer(keys.generate(tmp_path / "key")[0])


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    return Store(tmp_path / "store").run("default", create=True)
