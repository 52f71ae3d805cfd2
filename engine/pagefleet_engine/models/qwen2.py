"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on query, key and value only."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """Layers slide only where the configuration asks for it."""
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The biases are part of the family, whatever the configuration says."""
    return DecoderModel(arch, Traits(qkv_bias=True), placement)
