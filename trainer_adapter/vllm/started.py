"""What an engine was started with, to compare versions with: a swap changes weights and nothing else.

- ``config.json`` must say the same: vLLM has built the model from it. Two releases of transformers
  write the same configuration differently, so what differs is compared once more with all defaults
  filled in; numbers of special tokens do not matter to a model.
- Tensors: where a dry run cannot tell whether all of a model would be loaded, the version must have
  the names, shapes and types that the engine was started with.
- Tokenizer, chat template and defaults for sampling stay those that the engine was started with; a
  version with others is told of, and swapped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardcast.codec.spans import header_bytes, read_tensors
from shardcast.errors import EngineRefusedError, ShardcastError
from trainer_adapter.checkpoint import CONFIG, INDEX, Checkpoint
from trainer_adapter.documents import read_json
from trainer_adapter.specs import DTYPES

IGNORED: Final = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""What says nothing about how the model computes, or is fixed when the engine starts (dtype)."""

KEPT: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that vLLM reads when it starts, and never again."""

_UNSAID: Final = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
"""Members of those files that say where they come from, and nothing about the model."""

_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
MOST_NAMED: Final = 5
"""So many tensors are named in a message."""

Form = tuple[str, tuple[int, ...]]
"""Type (torch's name) and shape of a tensor."""


@dataclass(frozen=True)
class Started:
    """What an engine was started with, as far as it lies on this host.

    Attributes:
        config: Its ``config.json``; None if it is not known.
        forms: Its tensors by name; None if they are not known.
        kept: Its small files (``KEPT``), by name.
    """

    config: Mapping[str, Any] | None
    forms: Mapping[str, Form] | None
    kept: Mapping[str, bytes]

    @classmethod
    def at(cls, directory: Path | None) -> Started:
        """Read what there is in a directory; nothing is known where there is none."""
        if directory is None:
            return cls(None, None, {})
        try:
            config = read_json(directory / CONFIG)
        except ShardcastError:
            config = None
        kept = {name: data for name in KEPT if (data := _bytes(directory / name)) is not None}
        return cls(config, _forms(directory), kept)

    def check_config(self, checkpoint: Checkpoint) -> None:
        """Refuse a version of another configuration.

        Raises:
            EngineRefusedError: Names the first difference.
        """
        new, old = checkpoint.json(CONFIG), self.config
        if new is None or old is None or not _difference(new, old):
            return
        key = _difference(_filled_in(new), _filled_in(old))
        if key:
            raise refuse(
                f"{CONFIG} says {key} = {_short(new.get(key))}, the engine was started with "
                f"{_short(old.get(key))}: restart it with this version"
            )

    def check_forms(self, checkpoint: Checkpoint, why: str) -> None:
        """Refuse a version whose tensors are not those that the engine was started with.

        Args:
            checkpoint: The version.
            why: Why it is not enough that the model takes them.

        Raises:
            EngineRefusedError: Names tensors; or says that there is nothing to compare with.
        """
        if self.forms is None:
            raise refuse(
                f"{why}, and the checkpoint that the engine was started with is not on this host, "
                "so that its tensors could be compared: start the engine from a version of the run "
                "(--load-format shardcast)"
            )
        new = {spec.name: (spec.dtype, spec.shape) for spec in checkpoint.specs.values()}
        problems = [f"{name} is missing" for name in self.forms if name not in new]
        problems += [f"{name} is more than it has" for name in new if name not in self.forms]
        problems += [
            f"{name} is {_form(form)} instead of {_form(self.forms[name])}"
            for name, form in new.items()
            if name in self.forms and form != self.forms[name]
        ]
        if problems:
            raise refuse(
                f"{why}, so a version must have the tensors of the checkpoint that the engine was "
                f"started with: {listed(problems)}"
            )

    def differing(self, checkpoint: Checkpoint) -> list[str]:
        """Return the files that the engine goes on without: it has others of that name."""
        found = []
        for name, old in self.kept.items():
            new = _bytes(checkpoint.directory / name)
            if new is not None and not _same(name, new, old):
                found.append(name)
        config, old_config = checkpoint.json(CONFIG), self.config
        if config is not None and old_config is not None:
            found += [
                f"{CONFIG} ({key})"
                for key in _SPECIAL
                if key in config and key in old_config and config[key] != old_config[key]
            ]
        return found


def directory_of(model: str) -> Path | None:
    """Return where the checkpoint that vLLM was given lies: a directory, or a hub's in the cache."""
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, CONFIG)
    except (ImportError, ValueError, OSError):  # no name of a hub's
        return None
    return Path(found).parent if isinstance(found, str) else None


def _filled_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with all defaults, as this release of transformers spells it."""
    try:
        from transformers import CONFIG_MAPPING

        made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        filled: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    except Exception:  # a model of somebody's own
        return config
    return filled


def _difference(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    for key in sorted(set(new) | set(old)):
        if key not in IGNORED and new.get(key) != old.get(key):
            return key
    return ""


def _forms(directory: Path) -> Mapping[str, Form] | None:
    try:
        index = read_json(directory / INDEX)
        names = None if index is None else {str(name) for name in index["weight_map"].values()}
    except (ShardcastError, KeyError, AttributeError):
        return None
    files = [directory / name for name in sorted(names or ())] or sorted(
        directory.glob("*.safetensors")
    )
    forms: dict[str, Form] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                length = header_bytes(file.read(8)) or 0
                file.seek(0)
                tensors = read_tensors(file.read(length), 0, path.stat().st_size)
        except OSError:
            return None
        forms |= {one.name: (DTYPES.get(one.dtype, ("?", 0))[0], one.shape) for one in tensors}
    return forms or None


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def unlike(one: Path, other: Path) -> list[str]:
    """Return the files that vLLM reads at its start and that two directories do not have alike."""
    names = (CONFIG, *KEPT)
    return [name for name in names if not _same(name, _bytes(one / name), _bytes(other / name))]


def _same(name: str, new: bytes | None, old: bytes | None) -> bool:
    if new == old:
        return True
    if new is None or old is None or not name.endswith(".json"):
        return False
    try:
        one, two = json.loads(new), json.loads(old)
    except ValueError:
        return False
    if isinstance(one, dict) and isinstance(two, dict):
        for member in _UNSAID:
            one.pop(member, None)
            two.pop(member, None)
    return bool(one == two)


def refuse(problem: str) -> EngineRefusedError:
    """Return the error that says that a version is not one for this model."""
    return EngineRefusedError(problem, phase="check", reason="incompatible")


def listed(problems: list[str]) -> str:
    """Return problems in one line, the first few of them by name."""
    more = len(problems) - MOST_NAMED
    return "; ".join(problems[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _form(form: Form) -> str:
    return f"{form[0]} {list(form[1])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
