"""Mistral (Jiang et al., arXiv 2310.06825): Llama whose layers look back over a sliding window, without biases."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """One window for all layers, or none."""
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The window is in `arch.windows`, which attention reads."""
    return DecoderModel(arch, Traits(), placement)
