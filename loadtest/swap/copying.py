"""What copying so many bytes once in memory takes. A process of its own: it needs torch.

`python -m loadtest.swap.copying BYTES` copies one tensor into another whenever a line comes, both in
pages that were touched before, with one thread and with one for each core.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Copy at every line."""
    import torch

    source = torch.ones(int(sys.argv[1]) // 2, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    ways = {"one_ms": 1, "all_ms": len(os.sched_getaffinity(0))}
    print(json.dumps({"event": "warm", "threads": ways["all_ms"]}), flush=True)
    for number, _ in enumerate(sys.stdin):
        took = {}
        for name, threads in ways.items():
            torch.set_num_threads(threads)
            target.copy_(source)  # threads are started by the first one
            began = time.perf_counter()
            target.copy_(source)
            took[name] = (time.perf_counter() - began) * 1000
        print(json.dumps({"event": "copied", "number": number, **took}), flush=True)


if __name__ == "__main__":
    main()
