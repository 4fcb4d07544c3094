"""Runs the tests that need a real engine: `python -m tests.engine [PYTEST OPTIONS]`.

As the whole suite (``tests.__main__``): in parts beside each other, since an engine that starts uses one
core for most of that time; what fails is tried once more, alone, and named if it passes then.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.__main__ import Part, run

TIMEOUT_S: Final = 300

ROOT: Final = Path("tests/engine")
SERVERS: Final = ("agent", "documented", "ranks", "residue", "server", "server_contract")
"""Files whose tests share one program that has imported vLLM's server, and as many others as take the
rest of the time."""


def parts() -> list[Part]:
    """The files that start servers, the others; a new one belongs to the others."""
    files = sorted(str(file) for file in ROOT.glob("test_*.py"))
    servers = [str(ROOT / f"test_{name}.py") for name in SERVERS]
    return [[one for one in files if one not in servers], servers]


def options(given: Sequence[str]) -> list[str]:
    """What pytest is told."""
    return ["--timeout", str(TIMEOUT_S), *given]


if __name__ == "__main__":
    os.environ["SHARDCAST_ENGINE_TESTS"] = "1"
    sys.exit(run(parts(), options(sys.argv[1:])))
