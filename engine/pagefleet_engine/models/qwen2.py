"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on query, key and value only."""

from __future__ import annotations

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import BlockTraits
from pagefleet_engine.models.decoder import DecoderModel


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The biases are part of the family, whatever the configuration says."""
    return DecoderModel(arch, BlockTraits(qkv_bias=True), placement)
