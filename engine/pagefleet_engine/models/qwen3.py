"""Qwen3, dense (arXiv 2505.09388): Llama that normalises each query and key head before it is rotated."""

from __future__ import annotations

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import BlockTraits
from pagefleet_engine.models.decoder import DecoderModel


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = BlockTraits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, head_norm=True)
    return DecoderModel(arch, traits, placement)
