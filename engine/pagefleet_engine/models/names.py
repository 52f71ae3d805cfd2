"""What checkpoints call the parts of a decoder; an empty name adds no level."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Llama's, unless given."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    # Within a layer
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    post_attention_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    # Where attention and the MLP give something normalised
    pre_mlp_norm: str = "pre_feedforward_layernorm"
    post_mlp_norm: str = "post_feedforward_layernorm"
    # Within attention
    qkv: str = "qkv_proj"
    output: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    # Within an MLP without a gate
    up: str = "up_proj"
    down: str = "down_proj"
