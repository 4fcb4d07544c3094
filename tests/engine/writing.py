"""Lets somebody write to a version's file while an engine boots from it: after its second tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from tests.engine.injected import Injected
from trainer_adapter.checkpoint import Checkpoint

WRITTEN: Final = "SHARDCAST_TEST_WRITTEN"


def writing() -> dict[str, object]:
    """Return the options of an engine that boots meanwhile."""
    return {
        "worker_extension_cls": f"{__name__}.Written",
        "environment": {WRITTEN: "model.safetensors"},
    }


class Written(Injected):
    """What other engines of these tests have."""


def _tensors(self: Checkpoint, *, copied: bool = False) -> Iterator[tuple[str, Any]]:
    for number, one in enumerate(_whole(self, copied=copied)):
        if number == 2:
            path = self.directory / os.environ[WRITTEN]
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x00")
        yield one


_whole = Checkpoint.tensors
if WRITTEN in os.environ:
    Checkpoint.tensors = _tensors  # type: ignore[method-assign]
