"""OLMo 3 (Ai2, 2025): OLMo 2 with a window in three of four layers; the rotation is stretched in the others alone."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models import olmo2
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.gemma3 import ropes_by_kind


def read(shape: ModelShape) -> ModelArch:
    """Both kinds of layers have one base."""
    theta = shape.fields.number("rope_theta", 500_000.0)
    return replace(
        read_shared(shape, ropes=ropes_by_kind(shape, theta=theta, local_theta=theta)),
        layer_ropes=tuple(0 if window is None else 1 for window in shape.windows),
        mlp_bias=False,
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """As OLMo 2."""
    return olmo2.build(arch, placement)
