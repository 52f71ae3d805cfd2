"""Gemma 1 (arXiv 2403.08295): Llama with GELU gates, norms that store weights less one, and a scaled embedding."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """The first files say gelu and mean its tanh form."""
    shape.fields.must_be_unset("use_bidirectional_attention")
    shared = read_shared(shape)
    return replace(shared, mlp_bias=False, activation="gelu_tanh" if shared.activation == "gelu" else shared.activation)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        norm_unit_offset=True,
        embedding_scale=arch.hidden_size**0.5,
    )
    return DecoderModel(arch, traits, placement)
