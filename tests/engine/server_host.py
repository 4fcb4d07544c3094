"""vLLM's API servers, forked from one process that has imported vLLM already.

`python -m tests.engine.server_host` reads one JSON object a line: `argv`, `environment`, `log`; it
answers with the server's process id. The test's end is `tests.engine.servers`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any


def fork_engines() -> None:
    """Let engine core and workers be forked too: vLLM on CPUs spawns them, and each imports it all."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        original(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(checked)


def serve(argv: list[str]) -> None:
    """Be ``python -m vllm.entrypoints.openai.api_server ARGV``."""
    from vllm.entrypoints.launchers.api_server.entry import main

    import tests.engine.server_faults

    tests.engine.server_faults.install()
    fork_engines()
    sys.argv = ["api_server", *argv]
    main()


def main() -> None:
    """Fork a server for every line."""
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.environ.update(order["environment"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            serve(order["argv"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
