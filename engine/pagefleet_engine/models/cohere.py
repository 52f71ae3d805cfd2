"""Command R and R+ (Cohere, 2024): LayerNorm without bias, attention and MLP side by side, neighbours that rotate
against each other; R+ has a norm for each head. Command R7B and A (arXiv 2504.00698, `cohere2`) have windows in three
of four layers, and no rotation in the others."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.rope_config import read_rope


def read(shape: ModelShape) -> ModelArch:
    """Logits are scaled by `logit_scale`."""
    fields, has_windows = shape.fields, shape.model_type == "cohere2"
    rope = read_rope(fields, shape.head_dim)
    return replace(
        read_shared(shape, eps_field="layer_norm_eps", ropes=(rope, NO_ROPE) if has_windows else (rope,)),
        layer_ropes=tuple(1 if has_windows and window is None else 0 for window in shape.windows),
        mlp_bias=False,
        logit_scale=fields.number("logit_scale"),
        query_key_norm=fields.flag("use_qk_norm", False),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        norm="layer",
        norm_bias=False,
        layer_norms="shared",
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="stacked layer" if arch.query_key_norm else "none",
        interleaved_rotation=True,
    )
    return DecoderModel(arch, traits, placement)
