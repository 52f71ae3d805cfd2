"""Small random checkpoints, made by transformers itself so that its code and ours read the same files."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import transformers

_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide, so that logits spread and greedy choices are clear
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_FAMILY = {"mistral": {"sliding_window": 24}, "qwen3": {"head_dim": 32}}


def save_checkpoint(folder: Path, arch_name: str, dtype: str, shard_size: str, overrides: dict[str, Any]) -> None:
    """Write config.json and weights of a model of the family; norms and biases are random too."""
    name = _CLASSES[arch_name]
    config = getattr(transformers, f"{name}Config")(**(_TINY | _FAMILY.get(arch_name, {}) | overrides))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.2)
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def reference_model(folder: Path) -> Any:
    """transformers' own model of the folder, in float32."""
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()
