"""Runs the tests that need a real engine: `python -m tests.engine [PYTEST OPTIONS]`.

As the whole suite (``tests.__main__``): what fails is tried once more, alone, and named if it passes then.
"""

import os
import sys
from typing import Final

from tests.__main__ import run

TIMEOUT_S: Final = 300

if __name__ == "__main__":
    os.environ["SHARDCAST_ENGINE_TESTS"] = "1"
    sys.exit(run([["tests/engine"]], ["--timeout", str(TIMEOUT_S), *sys.argv[1:]]))
