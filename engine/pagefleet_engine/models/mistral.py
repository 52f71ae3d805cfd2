"""Mistral (Jiang et al., arXiv 2310.06825): Llama whose layers look back over a sliding window, without biases."""

from __future__ import annotations

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import BlockTraits
from pagefleet_engine.models.decoder import DecoderModel


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The window is in `arch.windows`, which attention reads."""
    return DecoderModel(arch, BlockTraits(), placement)
