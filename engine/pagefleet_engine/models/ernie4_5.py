"""ERNIE 4.5, dense (Baidu, 2025): Llama whose neighbours rotate against each other."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """`use_bias` is of attention and of the MLP."""
    biased = shape.fields.flag("use_bias", False)
    return replace(read_shared(shape), attention_bias=biased, mlp_bias=biased)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """All of them have biases or none."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        mlp_bias=arch.mlp_bias,
        interleaved_rotation=True,
    )
    return DecoderModel(arch, traits, placement)
