"""SmolLM3 (Hugging Face, 2025): Llama whose heads do not rotate in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape, rotated_layers

from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models import llama
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.rope_config import read_rope


def read(shape: ModelShape) -> ModelArch:
    """Which layers rotate follows from `no_rope_layers`, or from `no_rope_layer_interval`."""
    rotated = rotated_layers(shape.fields, shape.num_layers)
    return replace(
        read_shared(shape, ropes=(read_rope(shape.fields, shape.head_dim), NO_ROPE)),
        layer_ropes=tuple(0 if rotates else 1 for rotates in rotated),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """As Llama."""
    return llama.build(arch, placement)
