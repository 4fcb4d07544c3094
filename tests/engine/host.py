"""Engines in processes of their own, forked from one that has imported vLLM already.

`python -m tests.engine.host` reads one JSON object a line: options of an engine and a socket to serve
it on. What each engine answers is in `Engine`; the test's end is `tests.engine.engines`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec


class Engine:
    """vLLM's ``LLM`` under orders."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.update(options.pop("environment", {}))
        from vllm import LLM

        self.llm = LLM(
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=8,
            block_size=32,
            seed=0,
            disable_log_stats=True,
            weight_transfer_config={"backend": "shardcast"},
            worker_extension_cls="tests.engine.injected.Injected",
            **options,
        )

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Return tokens, and log-probabilities to the last bit."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in order["prompts"]],
            SamplingParams(
                temperature=0.0,
                max_tokens=order["tokens"],
                logprobs=3,
                ignore_eos=True,
                detokenize=False,
            ),  # fmt: skip
            use_tqdm=False,
        )
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "logprobs": [
                    sorted((token, entry.logprob.hex()) for token, entry in step.items())
                    for step in one.outputs[0].logprobs
                ],
            }
            for one in outputs
        ]

    def rpc(self, order: dict[str, Any]) -> Any:
        """Call a method on all ranks."""
        return self.llm.collective_rpc(order["method"], args=tuple(order.get("args", ())))

    def swap(self, order: dict[str, Any]) -> Any:
        """Do what docs/ENGINES.md says of engines in process."""
        from trainer_adapter.vllm.inprocess import swap
        from trainer_adapter.vllm.ranks import Target

        return msgspec.to_builtins(swap(self.llm, msgspec.convert(order["target"], Target)))

    def served(self, order: dict[str, Any]) -> Any:
        """Do what docs/ENGINES.md says of booting from a run."""
        from trainer_adapter.vllm.inprocess import served

        return msgspec.to_builtins(served(self.llm))

    def native(self, order: dict[str, Any]) -> None:
        """Drive vLLM's own interface of weight transfer."""
        self.llm.init_weight_transfer_engine({"init_info": order["target"]})
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": order["target"]})
        self.llm.finish_weight_update("native")
        self.llm.reset_prefix_cache()

    def reset(self, order: dict[str, Any]) -> None:
        """Forget the prefixes, as a server's pause does."""
        assert self.llm.reset_prefix_cache()

    def label(self, order: dict[str, Any]) -> str:
        """Return the label that tokens are stamped with."""
        return str(self.llm.get_weight_version())


def serve(options: dict[str, Any], path: str) -> None:
    """Start an engine and answer until the test's end is closed."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        lines = link.makefile("r", encoding="utf-8")

        def answer(work: Any, *args: Any) -> Any:
            try:
                result, error = work(*args), None
            except Exception as problem:
                traceback.print_exc()
                result, error = None, f"{type(problem).__name__}: {problem}"
            reply = result if work is not Engine else None
            link.sendall(json.dumps({"result": reply, "error": error}).encode() + b"\n")
            return result

        engine = answer(Engine, options)
        for line in lines:
            order = json.loads(line)
            answer(getattr(engine, order.pop("do")), order)


def main() -> None:
    """Fork an engine for every line."""
    import vllm.entrypoints.llm  # what all of them need
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                serve(order["options"], order["socket"])
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)


if __name__ == "__main__":
    main()
