"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on query, key and value only."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import named_windows, read_shared
from pagefleet_engine.models.decoder import DecoderModel

# transformers.Qwen2Config
_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}


def read(fields: ConfigFields) -> ModelArch:
    """Layers slide only where the configuration asks for it."""
    fields = fields.with_defaults(_DEFAULTS)
    arch = read_shared(fields)
    return replace(arch, windows=qwen_windows(fields, arch.num_layers))


def qwen_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Of the layers named in `layer_types`, else of those after the first `max_window_layers`."""
    if not fields.flag("use_sliding_window", False) or not fields.present("sliding_window"):
        return (None,) * num_layers
    kinds = fields.layer_types(num_layers)
    if kinds is None:
        first = fields.count("max_window_layers", 28, low=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return named_windows(fields, kinds)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """The biases are part of the family, whatever the configuration says."""
    return DecoderModel(arch, Traits(qkv_bias=True), placement)
