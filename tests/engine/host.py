"""Engines in processes of their own, forked from one that has imported vLLM already.

`python -m tests.engine.host` reads one JSON object a line: options of an engine and a socket to serve
it on. What each engine answers is in `Engine`; the test's end is `tests.engine.engines`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,
    "seed": 0,
    "disable_log_stats": True,
    "weight_transfer_config": {"backend": "shardcast"},
    "worker_extension_cls": "tests.engine.injected.Injected",
}


class Engine:
    """vLLM's ``LLM`` under orders."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.update(options.pop("environment", {}))
        from vllm import LLM

        self.llm = LLM(**{**DEFAULTS, **options})

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Return tokens, and log-probabilities to the last bit."""
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        batches = [[one] for one in prompts] if order["alone"] else [prompts]
        sampling = _sampling(order["tokens"])
        return [
            _answer_of(one)
            for batch in batches
            for one in self.llm.generate(batch, sampling, use_tqdm=False)
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

    def sleep(self, order: dict[str, Any]) -> None:
        """Sleep, as trainers on the same GPU let an engine; on CPUs no memory is given away."""
        self.llm.sleep(level=order.get("level", 1))

    def wake_up(self, order: dict[str, Any]) -> None:
        """Wake up again."""
        assert self.llm.wake_up()

    def hold_prefixes(self, order: dict[str, Any]) -> None:
        """Let the next reset of the prefix cache fail, as it does while something uses a block."""
        real = self.llm.reset_prefix_cache

        def fail(**members: bool) -> bool:
            self.llm.reset_prefix_cache = real
            return False

        self.llm.reset_prefix_cache = fail

    def with_connectors(self, order: dict[str, Any]) -> str:
        """Return why this engine could not swap, had it a KV connector."""
        from types import SimpleNamespace

        from vllm.config import KVTransferConfig

        from trainer_adapter.vllm.configured import settings_of
        from trainer_adapter.vllm.serving import unsupported

        transfer = KVTransferConfig(**order["transfer"])
        config = vars(self.llm.llm_engine.vllm_config) | {"kv_transfer_config": transfer}
        return unsupported(settings_of(SimpleNamespace(**config), plugins=None))

    def compilations(self, order: dict[str, Any]) -> dict[str, int]:
        """Return what vLLM, dynamo and inductor have counted in this process."""
        from dataclasses import asdict

        from torch._dynamo.utils import counters
        from vllm.compilation.counter import compilation_counter

        found = {f"vllm {name}": count for name, count in asdict(compilation_counter).items()}
        for kind in ("stats", "inductor"):
            found |= {f"{kind} {name}": int(count) for name, count in counters[kind].items()}
        return found

    def register_again(self, order: dict[str, Any]) -> None:
        """Do what vLLM does in some of its processes."""
        from trainer_adapter.vllm.plugin import register

        register()
        register()

    def label(self, order: dict[str, Any]) -> str:
        """Return the label that tokens are stamped with."""
        return str(self.llm.get_weight_version())


class AsyncEngine:
    """vLLM's ``AsyncLLM`` under orders; its engine core is a process of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        arguments = AsyncEngineArgs(**{**DEFAULTS, **options})

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self.llm = self._loop.run_until_complete(start())

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """As ``Engine`` does, one prompt at a time."""
        return self._loop.run_until_complete(self._generate(order))

    async def _generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        outputs = [await self._one(ids, order["tokens"]) for ids in order["prompts"]]
        return [{name: one[name] for name in ("tokens", "logprobs")} for one in outputs]

    async def _one(self, ids: list[int], tokens: int, seen: Any = None) -> dict[str, Any]:
        self._count = getattr(self, "_count", 0) + 1
        last: Any = None
        async for output in self.llm.generate(
            {"prompt_token_ids": ids}, _sampling(tokens), str(self._count)
        ):
            last = output
            if seen is not None:
                seen(len(output.outputs[0].token_ids))
        return {**_answer_of(last), "spans": [vars_of(s) for s in last.outputs[0].weight_versions]}

    def over_a_swap(self, order: dict[str, Any]) -> dict[str, Any]:
        """Swap, as docs/ENGINES.md says, while a request is at its tenth token."""
        return self._loop.run_until_complete(self._over_a_swap(order))

    async def _over_a_swap(self, order: dict[str, Any]) -> dict[str, Any]:
        from trainer_adapter.vllm.inprocess import attach, swap_async
        from trainer_adapter.vllm.machine import SwapError
        from trainer_adapter.vllm.ranks import Target

        target = msgspec.convert(order["target"], Target)
        swapper = await attach(self.llm)
        kept = ""
        try:
            await swap_async(swapper, target, requests="keep")
        except SwapError as error:
            kept = error.message
        booted = await self.llm.get_weight_version()
        tenth = asyncio.Event()
        request = asyncio.ensure_future(
            self._one([5, 17, 101], order["tokens"], lambda n: tenth.set() if n >= 10 else None)
        )
        await tenth.wait()
        answer = await swap_async(swapper, target)
        told = await request
        label = await self.llm.get_weight_version()
        await swapper.close()
        salted = await attach(self.llm, salted=True)
        allowed = (swapper.state.keep_allowed, salted.state.keep_allowed)
        await salted.close()
        said = {"pause_ms": answer.pause_ms, "kept": kept, "keep_allowed": allowed}
        return {**told, "booted": booted, "label": label, **said}


class Program:
    """A program of docs/ENGINES.md, as it stands there, with names that are its reader's.

    It ends by ``_EnoughError``, once tokens of the wanted version came out.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.update(options.get("environment", {}))

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run it; return the label of each answer, and what it printed."""
        said = io.StringIO()
        labels: list[list[str]] = []

        def take(outputs: list[Any]) -> None:
            labels.append(
                [span.version for one in outputs for span in one.outputs[0].weight_versions]
            )
            if labels[-1][-1].startswith(order["until"]):
                raise _EnoughError

        async def rollouts(engine: Any) -> None:
            async with asyncio.timeout(order["seconds"]):
                while True:
                    asked = engine.generate("w5 w17 w101", _sampling(60), str(len(labels)))
                    take([[output async for output in asked][-1]])

        names = {
            "__name__": "__main__",
            "prompts": ["w5 w17 w101"],
            "take": take,
            "rollouts": rollouts,
        }
        with contextlib.redirect_stdout(said), contextlib.suppress(_EnoughError):
            exec(compile(order["text"], "docs/ENGINES.md", "exec"), names)
        return {"labels": labels, "said": said.getvalue()}


class _EnoughError(Exception):
    """A program has shown what it does."""


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=tokens, logprobs=3, ignore_eos=True, detokenize=False
    )


def _answer_of(output: Any) -> dict[str, Any]:
    return {
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": [
            sorted((token, entry.logprob.hex()) for token, entry in step.items())
            for step in output.outputs[0].logprobs
        ],
    }


def vars_of(span: Any) -> dict[str, Any]:
    return {"version": span.version, "start": span.start, "end": span.end}


def pretend(version: str = "", without: str = "") -> None:
    """Let this process's vLLM be another one."""
    import vllm
    from vllm.model_executor.model_loader.reload import layerwise

    if version:
        vllm.__version__ = version
    if without:
        delattr(layerwise, without)


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
            reply = None if isinstance(result, (Engine, AsyncEngine, Program)) else result
            link.sendall(json.dumps({"result": reply, "error": error}).encode() + b"\n")
            return result

        kind = {"": Engine, "async": AsyncEngine, "program": Program}[options.pop("kind", "")]
        pretend(**options.pop("pretend", {}))
        engine = answer(kind, options)
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
