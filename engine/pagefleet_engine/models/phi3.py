"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with merged projections in the checkpoint, LongRoPE
for long contexts, and in Phi-4-mini heads that rotate in part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import read_shared, uniform_windows
from pagefleet_engine.models.decoder import DecoderModel

# transformers.Phi3Config
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}


def read(fields: ConfigFields) -> ModelArch:
    """One window for all layers, or none."""
    fields = fields.with_defaults(_DEFAULTS)
    arch = read_shared(fields)
    return replace(arch, windows=uniform_windows(fields, arch.num_layers), attention_bias=False, mlp_bias=False)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """There are no biases, whatever the configuration says."""
    return DecoderModel(arch, Traits(merged_in_checkpoint=True), placement)
