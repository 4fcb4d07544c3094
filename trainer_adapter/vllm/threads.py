"""How many of torch's threads work for a thread that must not take the engine's cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in this thread: the others are the engine's, which is serving.

    torch keeps one more figure, for threads that have not begun, and whoever sets his own sets that
    as well. Another thread puts it back at once: who begins meanwhile keeps what he finds. (vLLM has
    replaced ``torch.set_num_threads`` by a warning.)
    """
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    restoring = threading.Thread(
        target=torch._C.set_num_threads, args=(before,), name="shardcast-threads", daemon=True
    )
    restoring.start()
    restoring.join()
    try:
        yield
    finally:
        torch._C.set_num_threads(before)
