"""Granite 3 (IBM, 2024): Llama with multipliers of embedding, scores, residual and logits."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """Logits are divided by their multiplier."""
    fields = shape.fields
    return replace(
        read_shared(shape),
        query_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention and to all of the MLP."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        mlp_bias=arch.mlp_bias,
        embedding_scale=arch.embedding_scale,
    )
    return DecoderModel(arch, traits, placement)
