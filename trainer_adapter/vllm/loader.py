"""``--load-format shardcast``: boot straight from what ``shardcast follow`` or ``pull`` keeps.

``--model OUT/current --load-format shardcast``. Where ``current`` leads is looked up once, before vLLM
reads anything (``pinning``), and all ranks load that version, whatever ``current`` becomes meanwhile;
each verifies every byte that it loads against the manifest. ``--model-loader-extra-config
'{"digest": "..."}'`` names the version instead. Because the engine was given ``OUT/current`` and not
``OUT/versions/N``, its compile cache serves every version.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from shardcast.errors import UsageError
from trainer_adapter.checkpoint import Checkpoint
from trainer_adapter.vllm.agreement import Agreement, Alone, World
from trainer_adapter.vllm.pinning import DIGEST, agree_on, check_start, resolve
from trainer_adapter.vllm.ranks import Target

log = logging.getLogger("vllm.shardcast")

_OPTIONS: Final = frozenset({DIGEST})

_booted: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Target, Checkpoint]] = (
    weakref.WeakKeyDictionary()
)
"""From the loader, which has no more to do with a model that is loaded, to its transfer engine."""


def take_booted(model: torch.nn.Module) -> tuple[Target, Checkpoint] | None:
    """Return what a model was loaded with by this loader; the caller closes it from here on."""
    return _booted.pop(model, None)


class ShardcastLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader, which gets its tensors from a verified version."""

    def __init__(self, load_config: Any) -> None:
        """Read the options.

        Raises:
            UsageError: If there are others than ``digest``.
        """
        options = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(set(options) - _OPTIONS):
            raise UsageError(f"--model-loader-extra-config: {', '.join(unknown)}: only 'digest'")
        self._digest: str | None = options.get(DIGEST)
        plain = copy(load_config)
        plain.model_loader_extra_config = {}
        super().__init__(plain)

    def download_model(self, model_config: Any) -> None:
        """Check that there is something to load: versions come by ``shardcast follow``."""
        self._resolve(Path(str(model_config.model)))

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pinned version's tensors, verified.

        Raises:
            ShardcastError: If there is none, or its bytes are not those that were published.
        """
        self.counter_before_loading_weights = time.perf_counter()  # what vLLM logs counts from here
        where = Path(str(model_config.model))
        target = agree_on(_agreement(), lambda: self._resolve(where), where)
        checkpoint = Checkpoint(
            Path(target.path), run=target.run, version=target.version, digest=target.digest
        )
        try:
            checkpoint.verify(threads=max(1, len(os.sched_getaffinity(0))))
            check_start(checkpoint, where)
            found = checkpoint.nonfinite(threads=len(os.sched_getaffinity(0)))
            if found:
                log.warning("version %d: %s", target.version, found)
            target = msgspec.structs.replace(target, nonfinite=found)
            log.info("loading version %d of run %s", target.version, target.run)
            yield from checkpoint.tensors()
            checkpoint.require_unchanged("loaded")  # vLLM takes all of them, so it comes here
        except BaseException:
            checkpoint.close()
            raise
        _booted[model] = (target, checkpoint)

    def _resolve(self, where: Path) -> Target:
        return resolve(where, self._digest)


def _agreement() -> Agreement:
    return World() if torch.distributed.is_initialized() else Alone()
