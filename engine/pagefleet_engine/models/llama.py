"""Llama 2 and 3.x (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from __future__ import annotations

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import BlockTraits
from pagefleet_engine.models.decoder import DecoderModel


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The plain form; a configuration may add biases to all of attention and to all of the MLP."""
    traits = BlockTraits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, mlp_bias=arch.mlp_bias)
    return DecoderModel(arch, traits, placement)
