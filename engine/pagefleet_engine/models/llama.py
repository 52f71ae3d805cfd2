"""Llama 2 and 3.x (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """The plain form."""
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention and to all of the MLP."""
    traits = Traits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, mlp_bias=arch.mlp_bias)
    return DecoderModel(arch, traits, placement)
