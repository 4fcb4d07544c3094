"""Lets ``current`` move while an engine starts: when this is imported, where the environment says so.

vLLM imports a worker's extension when it has read the model's configuration and before it loads its
weights; ``server_faults`` imports it in a server that has loaded them and serves nothing yet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shardcast.store.run import RunStore
from tests.engine.injected import Injected

CURRENT: Final = "SHARDCAST_TEST_CURRENT"
NEXT: Final = "SHARDCAST_TEST_NEXT"


def moving(current: Path, version: int) -> dict[str, object]:
    """Return the options of an engine that starts while a version becomes current."""
    return {
        "worker_extension_cls": f"{__name__}.Moved",
        "environment": variables(current, version),
    }


def variables(current: Path, version: int) -> dict[str, str]:
    """Return what the environment says of it."""
    return {CURRENT: str(current), NEXT: str(version)}


class Moved(Injected):
    """What other engines of these tests have."""


if CURRENT in os.environ:
    RunStore(Path(os.environ[CURRENT]).parent, "policy").switch_current(int(os.environ[NEXT]))
