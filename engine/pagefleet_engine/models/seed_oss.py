"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """The plain form.

    Raises:
        ModelLoadError: what attention gives has a bias, too.
    """
    if shape.fields.flag("attention_out_bias", False):
        raise ModelLoadError(
            f"{shape.fields.source}: attention_out_bias is true; pagefleet runs Seed-OSS as published, without"
        )
    return read_shared(shape)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may leave biases of attention out, and add some to the MLP."""
    return DecoderModel(arch, Traits(qkv_bias=arch.attention_bias, mlp_bias=arch.mlp_bias), placement)
