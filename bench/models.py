"""Makes checkpoints of Llama's shapes with random weights, the same for the same seed, for comparisons with peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from pagefleet_engine.bench.shapes import named_shapes
from safetensors.torch import save_file

LLAMA_125M: dict[str, object] = {
    **named_shapes()["llama-125m"],
    "architectures": ["LlamaForCausalLM"],  # which peers want to know
    "bos_token_id": 1,
}
"""12 layers, width 768, MLP 2048, 12 heads, 4 KV heads, 32k vocabulary: 124.7 M parameters, 249 MB in bfloat16."""


def llama_checkpoint(folder: Path, config: Mapping[str, object], seed: int = 0) -> Path:
    """Write a Llama checkpoint with weights from N(0, 0.02) into `folder`, unless it is there already."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in _llama_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    return folder


def _llama_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    width, mlp, head_dim = size("hidden_size"), size("intermediate_size"), size("head_dim")
    q, kv = size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size("vocab_size"), width),
        "model.norm.weight": (width,),
        "lm_head.weight": (size("vocab_size"), width),
    }
    for layer in range(size("num_hidden_layers")):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (q, width),
                "self_attn.k_proj": (kv, width),
                "self_attn.v_proj": (kv, width),
                "self_attn.o_proj": (width, q),
                "mlp.gate_proj": (mlp, width),
                "mlp.up_proj": (mlp, width),
                "mlp.down_proj": (width, mlp),
            }.items()
        }
    return shapes
