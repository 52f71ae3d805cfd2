"""Mistral (Jiang et al., arXiv 2310.06825): Llama whose layers look back over a sliding window, without biases."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import read_shared, uniform_windows
from pagefleet_engine.models.decoder import DecoderModel

# transformers.MistralConfig
_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def read(fields: ConfigFields) -> ModelArch:
    """One window for all layers, or none."""
    fields = fields.with_defaults(_DEFAULTS)
    arch = read_shared(fields)
    return replace(arch, windows=uniform_windows(fields, arch.num_layers))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The window is in `arch.windows`, which attention reads."""
    return DecoderModel(arch, Traits(), placement)
