"""EXAONE 4.0 (arXiv 2507.11407): what attention and MLP give is normalised, and each query and key head; the 32B has
a window in three of four layers, and no rotation in the others."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.rope_config import read_rope


def read(shape: ModelShape) -> ModelArch:
    """All layers rotate where the configuration has no `sliding_window`."""
    fields = shape.fields
    is_hybrid = fields.present("sliding_window")
    return replace(
        read_shared(shape, ropes=(read_rope(fields, shape.head_dim), NO_ROPE)),
        layer_ropes=tuple(1 if is_hybrid and window is None else 0 for window in shape.windows),
        attention_bias=False,
        mlp_bias=False,
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Nothing is left to the configuration."""
    return DecoderModel(arch, Traits(query_key_norm="heads", layer_norms="after"), placement)
