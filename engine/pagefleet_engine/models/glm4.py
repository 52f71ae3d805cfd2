"""GLM-4 as Hugging Face has it (arXiv 2406.12793): heads whose first half rotates, neighbours against each other, and a
merged gate; and the models of 2025 (GLM-4-0414, `glm4`), which also normalise what attention and MLP give."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """The plain form."""
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may leave biases of query, key and value out."""
    around = arch.model_type == "glm4"
    names = Names(
        post_attention_norm="post_self_attn_layernorm",
        pre_mlp_norm="post_attention_layernorm",
        post_mlp_norm="post_mlp_layernorm",
    )
    traits = Traits(
        qkv_bias=arch.attention_bias,
        interleaved_rotation=True,
        merged_gate_up=True,
        layer_norms="around" if around else "before",
        names=names if around else Names(),
    )
    return DecoderModel(arch, traits, placement)
