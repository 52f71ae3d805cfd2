"""Qwen3, dense (arXiv 2505.09388): Llama that normalises each query and key head before it is rotated."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.qwen2 import qwen_windows

# transformers.Qwen3Config
_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}


def read(fields: ConfigFields) -> ModelArch:
    """Windows as in Qwen2."""
    fields = fields.with_defaults(_DEFAULTS)
    arch = read_shared(fields)
    return replace(arch, windows=qwen_windows(fields, arch.num_layers))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, query_key_norm="heads")
    return DecoderModel(arch, traits, placement)
