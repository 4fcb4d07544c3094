"""SGLang's own server on a CPU without its kernels: `python -m tests.engine_sglang.serve OPTIONS`.

Nothing of SGLang is changed but for one fault that tests inject. What is put in place of other packages:
``sgl_kernel`` (no wheel for CPUs exists) raises when it is called, which with torch's attention it never is;
torchvision is loaded without its compiled part (``__init__``); memory is not pinned, as there is no accelerator. SGLang's
processes are spawned, and run this module first, too.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.engine_sglang.servers import BREAK

BREAK_AFTER: Final = 5


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def raising(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return raising


def _put_in_place() -> None:
    """Before anything of SGLang is imported."""
    kernel = types.ModuleType("sgl_kernel")
    kernel.__getattr__ = _missing  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = kernel

    import torch

    for name in ("empty", "zeros", "tensor"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def _unpinned(make: Any) -> Any:
    def making(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return making


def _breakable() -> None:
    """Let a reading of weights break in the middle while the file says so."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    order = Path(os.environ[BREAK])
    read = DefaultModelLoader._get_weights_iterator

    def reading(loader: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        left = int(order.read_text())
        order.write_text(str(max(left - 1, 0)))
        for number, weight in enumerate(read(loader, *arguments, **options)):
            if left > 0 and number == BREAK_AFTER:
                raise OSError("the disk is gone")
            yield weight

    DefaultModelLoader._get_weights_iterator = reading


_put_in_place()
_breakable()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
