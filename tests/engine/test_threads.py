"""What packs weights beside a serving engine takes one of torch's threads, and none from others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from trainer_adapter.vllm.threads import one_thread


def in_a_new_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_only_the_thread_itself_has_one_thread() -> None:
    """Also not those that begin meanwhile, which would keep it for as long as they live."""
    found: dict[str, int] = {}

    def note(name: str) -> None:
        found[name] = torch.get_num_threads()

    def pack() -> None:
        with one_thread():
            note("itself")
            in_a_new_thread(lambda: note("begun meanwhile"))
        note("afterwards")

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        in_a_new_thread(pack)
        note("another")
    finally:
        torch.set_num_threads(before)
    assert found == {"itself": 1, "begun meanwhile": 3, "afterwards": 3, "another": 3}
