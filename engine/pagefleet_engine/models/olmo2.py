"""OLMo 2 (arXiv 2501.00656): Llama that normalises what attention and MLP give, and queries and keys as a whole."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """As Llama; the MLP has no biases."""
    return replace(read_shared(shape), mlp_bias=False)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="projection",
        layer_norms="after",
    )
    return DecoderModel(arch, traits, placement)
