"""Qwen3, dense (arXiv 2505.09388): Llama that normalises each query and key head before it is rotated."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """Windows as in Qwen2."""
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, query_key_norm="heads")
    return DecoderModel(arch, traits, placement)
