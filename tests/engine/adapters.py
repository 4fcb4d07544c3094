"""A random LoRA adapter as PEFT saves it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.engine.checkpoints import SIZES

RANK = 8


def save_adapter(directory: Path, seed: int) -> Path:
    """Save an adapter of the attention's projections, large enough to change every answer."""
    directory.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    hidden = SIZES["hidden_size"]
    head = hidden // SIZES["num_attention_heads"]
    wide = {"q_proj": hidden, "v_proj": head * SIZES["num_key_value_heads"]}
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, size in wide.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, hidden, generator=random)
            up = torch.randn(size, RANK, generator=random)
            tensors[f"{where}.lora_A.weight"] = (0.3 * down).to(torch.bfloat16)
            tensors[f"{where}.lora_B.weight"] = (0.3 * up).to(torch.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none",
        "lora_dropout": 0.0, "target_modules": sorted(wide), "base_model_name_or_path": "policy",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
