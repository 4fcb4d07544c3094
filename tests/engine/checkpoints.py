"""Small random models as transformers saves them, and versions of them in a worker's OUT."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from shardcast.publisher import publish_directory
from shardcast.publishing import PublishOptions
from shardcast.store.run import RunStore
from tests.contract.made import signer
from trainer_adapter.vllm.ranks import Target

RUN = "policy"
VOCABULARY = 384

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _qwen2(tied: bool, **more: Any) -> Any:
    return transformers.Qwen2Config(**{**SIZES, **more}, tie_word_embeddings=tied)


def _llama(**more: Any) -> Any:
    return transformers.LlamaConfig(**{**SIZES, **more}, tie_word_embeddings=False)


def _qwen3(**more: Any) -> Any:
    return transformers.Qwen3Config(**{**SIZES, **more}, head_dim=32, tie_word_embeddings=True)


def _moe(**more: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **{**SIZES, **more},
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        tie_word_embeddings=False,
    )


CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen2": partial(_qwen2, False),
    "qwen2-tied": partial(_qwen2, True),
    "qwen3-tied": _qwen3,
    "llama": _llama,
    "qwen3-moe": _moe,
}


def save(kind: str, dtype: str, seed: int, directory: Path, **sizes: int) -> Path:
    """Save a random model; weights large enough that two seeds never agree on a token for long."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
            else:
                parameter.normal_(1.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """Save a tokenizer beside a model: token 17 is the word ``w17``."""
    words = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"
    )
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", eos_token="w1"
    )
    fast.chat_template = "{% for m in messages %}w4 {{ m['content'] }} {% endfor %}w5"
    fast.save_pretrained(directory)
    return directory


def change(directory: Path, work: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite the tensors of a checkpoint directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    work(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def change_config(directory: Path, **members: object) -> Path:
    """Rewrite members of a checkpoint's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))
    return directory


class Out:
    """A worker's OUT: a run's directory that our own publisher fills. ``current`` as a worker has it."""

    def __init__(self, root: Path) -> None:
        self.root = root / RUN
        self.scratch = root / "scratch"
        self.run = RunStore(self.root, RUN)
        self._step = 0

    @property
    def current(self) -> Path:
        return self.root / "current"

    def publish(self, checkpoint: Path, *, current: bool = True) -> Target:
        """Publish a directory as the next version."""
        self._step += 10
        options = PublishOptions(
            source=checkpoint, threads=1, keep=100, delta=False, step=self._step
        )
        done = publish_directory(options, self.run, [signer()], lambda: time.time_ns() // 1_000_000)
        if current:
            self.run.switch_current(done.ref.version)
        return Target(
            run=RUN,
            version=done.ref.version,
            digest=done.ref.manifest,
            path=str(self.run.version_directory(done.ref.version)),
            step=done.ref.step,
        )

    def model(self, kind: str, dtype: str, seed: int, **sizes: int) -> Target:
        """Publish a random model."""
        directory = self.scratch / f"{kind}-{dtype}-{seed}"
        return self.publish(save(kind, dtype, seed, directory, **sizes))

    def broken(
        self, good: Path, name: str, work: Callable[[dict[str, torch.Tensor]], None]
    ) -> Target:
        """Publish a checkpoint that somebody has spoilt before it was published."""
        directory = self.scratch / name
        shutil.copytree(good, directory)
        return self.publish(change(directory, work), current=False)
