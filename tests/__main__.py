"""Runs the whole suite: `python -m tests [PYTEST OPTIONS]`.

Most fault tests wait for something that does not come, and need little of the machine meanwhile. So they
run beside the others, as a pytest of their own; its output follows that of the others.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence

WAITING = ("tests/faults",)


def main(options: Sequence[str]) -> int:
    """Run both halves; 0 if both passed."""
    pytest = [sys.executable, "-m", "pytest", *options]
    others = [*pytest, "tests", *(f"--ignore={path}" for path in WAITING)]
    with tempfile.TemporaryFile() as output:
        waiting = subprocess.Popen([*pytest, *WAITING], stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.call(others)
            second = waiting.wait()
        finally:
            waiting.terminate()
            waiting.wait()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return first or second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
