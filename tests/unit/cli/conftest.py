"""Running the command line in this process, with a home directory of its own."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardcast.cli.main import app

Event = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[Event]:
        """Its stdout as events; fails if a line is anything else."""
        found = [json.loads(line) for line in self.stdout.splitlines()]
        assert all(isinstance(event, dict) for event in found)
        return found

    def event(self, kind: str) -> Event:
        """Its only event of a kind."""
        (found,) = [event for event in self.events if event["event"] == kind]
        return found


Cli = Callable[..., Ran]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in list(os.environ):
        if name.startswith("SHARDCAST_"):
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object, env: dict[str, str] | None = None) -> Ran:
        result = CliRunner().invoke(
            app, [str(part) for part in arguments], env=env, prog_name="shardcast"
        )
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "ckpt"
    (directory / "sub").mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama"}\n')
    (directory / "empty.txt").write_bytes(b"")
    (directory / "sub" / "tokenizer.json").write_text("{}")
    data = bytes(range(256)) * 3000
    (directory / "model-00001-of-00002.safetensors").write_bytes(data)
    (directory / "model-00002-of-00002.safetensors").write_bytes(data[::-1])
    return directory
