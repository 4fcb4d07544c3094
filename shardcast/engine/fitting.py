"""Whether a version has the tensors of what an engine has loaded, by names and shapes.

SGLang does not ask: where a tensor is missing or has another shape it loads the rest, answers that it
succeeded, and serves a mixture. So its driver asks before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardcast.codec.spans import header_bytes, read_tensors
from shardcast.store.files import disk_errors

_SHOWN: Final = 3
_INDEX: Final = "model.safetensors.index.json"
_CONFIG: Final = "config.json"
_TIED_HEAD: Final = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]


def misfit(loaded: Path, new: Path) -> str | None:
    """Return what a version has otherwise than the directory that an engine has loaded, or None.

    None, too, where the loaded directory is not on this host or has no safetensors files.

    Args:
        loaded: What the engine says it has loaded.
        new: The version's directory.

    Raises:
        DiskError: If the version's files cannot be read.
    """
    if not loaded.is_absolute() or not loaded.is_dir():
        return None
    have = read_shapes(loaded)
    return differences(have, read_shapes(new), tied=_is_tied(new)) if have else None


def differences(have: Shapes, new: Shapes, *, tied: bool) -> str | None:
    """Return in words how two sets of tensors differ, or None. Pure.

    Args:
        have: Those that are loaded, by name.
        new: Those of the version.
        tied: Whether the output embedding may be left out, being the input embedding.
    """
    free = {_TIED_HEAD} if tied else set()
    lines = [f"it lacks {name}" for name in sorted(have.keys() - new.keys() - free)]
    lines += [f"{name} is not in the model" for name in sorted(new.keys() - have.keys() - free)]
    lines += [
        f"{name} is {list(have[name])} there and {list(new[name])} here"
        for name in sorted(have.keys() & new.keys())
        if have[name] != new[name]
    ]
    if not lines:
        return None
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a directory's safetensors files, by name.

    Raises:
        DiskError: If one cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    names = _indexed(directory) or {path.name for path in directory.glob("*.safetensors")}
    for path in sorted(directory / name for name in names):
        with disk_errors(path, "reading"), path.open("rb") as file:
            start = file.read(8)
            length = header_bytes(start)
            header = start + file.read(length - 8) if length is not None else b""
            size = path.stat().st_size
        shapes |= {one.name: one.shape for one in read_tensors(header, 0, size)}
    return shapes


def _indexed(directory: Path) -> set[str]:
    files = _members(directory / _INDEX).get("weight_map")
    return {str(one) for one in files.values()} if isinstance(files, dict) else set()


def _is_tied(directory: Path) -> bool:
    config = _members(directory / _CONFIG)
    text = config.get("text_config")
    return any(
        one.get("tie_word_embeddings") is True
        for one in (config, text if isinstance(text, dict) else {})
    )


def _members(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
