"""Where things live when no option says so (XDG Base Directory Specification)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path


def _base(environment: Mapping[str, str], variable: str, fallback: str) -> Path:
    value = environment.get(variable, "")
    if value.startswith("/"):  # the specification says to ignore relative paths
        return Path(value)
    return Path(environment.get("HOME") or Path.home()) / fallback


def default_store(environment: Mapping[str, str] | None = None) -> Path:
    """Return the store that commands use without ``--store``."""
    chosen = os.environ if environment is None else environment
    return _base(chosen, "XDG_DATA_HOME", ".local/share") / "shardcast" / "store"


def default_key_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return where the publisher's key pair is without ``--key``."""
    chosen = os.environ if environment is None else environment
    return _base(chosen, "XDG_CONFIG_HOME", ".config") / "shardcast"


def remote_memory(url: str, run: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return where a publisher remembers what it knows of a run at a remote origin."""
    chosen = os.environ if environment is None else environment
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return _base(chosen, "XDG_STATE_HOME", ".local/state") / "shardcast" / "origins" / name / run


def remote_cache(url: str, run: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return where a publisher keeps the last version that it published to a remote origin."""
    chosen = os.environ if environment is None else environment
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return _base(chosen, "XDG_CACHE_HOME", ".cache") / "shardcast" / "origins" / name / run
