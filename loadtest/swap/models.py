"""Random models of known sizes, as transformers saves them. A process of its own: it needs torch.

`python -m loadtest.swap.models SIZE DIRECTORY NAME...` writes `DIRECTORY/NAME` for each name. A name
that ends in `-step` is the one before it after a made-up step of training (``CHANGED`` of the
elements differ, each by its last bit), others are made anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

CHANGED: Final = 0.0044
"""The share that one step of fine-tuning in bf16 was measured to change (README.md, "Measured")."""

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "4M": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
        "tie_word_embeddings": False,
    },
    "50M": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 24576,
        "tie_word_embeddings": False,
    },
    "500M": {  # Qwen2.5-0.5B
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Qwen2. 4.5, 49 and 494 million parameters; the largest has tied embeddings, as small models do."""


def main() -> None:
    """Write the models that the command line names."""
    import torch
    import transformers
    from safetensors.torch import save_file

    size, directory, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    config = transformers.Qwen2Config(
        **SHAPES[size], max_position_embeddings=1024,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in transformers.AutoModelForCausalLM.from_config(config)
            .state_dict()
            .items()
            if not (config.tie_word_embeddings and name == "lm_head.weight")
        }
    dice = torch.Generator().manual_seed(int.from_bytes(size.encode()))
    tensors: dict[str, Any] = {}
    for name in names:
        if name.endswith("-step"):
            for tensor in tensors.values():
                bits = tensor.view(torch.int16)
                bits ^= (torch.rand(bits.shape, generator=dice) < CHANGED).to(torch.int16)
        else:
            tensors = {
                key: torch.ones(shape, dtype=torch.bfloat16)
                if len(shape) == 1 and "norm" in key
                else torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.03, generator=dice)
                for key, shape in shapes.items()
            }
        target = directory / name
        target.mkdir(parents=True)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(target)
    total = sum(tensor.numel() for tensor in tensors.values())
    print(json.dumps({"event": "saved", "parameters": total, "bytes": 2 * total}), flush=True)


if __name__ == "__main__":
    main()
