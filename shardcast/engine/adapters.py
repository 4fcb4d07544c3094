"""Whether a version is a LoRA adapter, and what it is called: by its files and metadata. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from shardcast.engine.decide import Mode
from shardcast.protocol.layout import Layout

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
"""As PEFT saves them."""
METADATA_KEY: Final = "lora"
"""What the publisher calls it (``publish --metadata lora=NAME``)."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class Use(NamedTuple):
    """What an engine is to do with a version.

    Attributes:
        adapter: Load it as an adapter of this name; None: as the model's weights.
        refusal: Why no engine is told to take it, and who must do what; empty where they are.
    """

    adapter: str | None = None
    refusal: str = ""


def is_adapter(layout: Layout) -> bool:
    """Say whether a version's files are an adapter: its configuration, and no weights but its own."""
    paths = [entry.path for entry in layout.files]
    weights = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    return CONFIG in paths and weights == [WEIGHTS]


def use_of(layout: Layout, *, name: str | None, mode: Mode) -> Use:
    """Return what engines do with a version.

    Args:
        layout: Its layout.
        name: What the run's adapters are called here (``--lora``); None: as the publisher says, and
            where that says nothing, as the run.
        mode: Who activates.
    """
    version = f"version {layout.version} of run {layout.run}"
    if not is_adapter(layout):
        if name is None:
            return Use()
        return Use(
            refusal=f"{version} is no LoRA adapter ({CONFIG} beside {WEIGHTS}, and no other weights), "
            f"and --lora {name} was given: leave that away to load it as the model's weights, or "
            "follow the run that the adapters are published in"
        )
    if mode is Mode.MANUAL:
        return Use(
            refusal=f"{version} is a LoRA adapter, and with --activate manual nobody but you loads "
            "it: ask the engine for it (docs/ENGINES.md, LoRA adapters), or use --activate auto"
        )
    called = name or layout.metadata.get(METADATA_KEY) or layout.run
    if _NAME.fullmatch(called) is None:
        return Use(
            refusal=f"{version} is a LoRA adapter that its publisher calls {called[:80]!r}: use "
            "letters, digits and . _ - there (publish --metadata lora=NAME), or give --lora NAME"
        )
    return Use(adapter=called)
