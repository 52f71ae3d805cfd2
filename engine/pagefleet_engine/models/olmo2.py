"""OLMo 2 (arXiv 2501.00656): Llama that normalises what attention and MLP give, and queries and keys as a whole."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import read_shared
from pagefleet_engine.models.decoder import DecoderModel

# transformers.Olmo2Config
_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def read(fields: ConfigFields) -> ModelArch:
    """As Llama, with defaults of its own; the MLP has no biases."""
    return replace(read_shared(fields.with_defaults(_DEFAULTS)), mlp_bias=False)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="projection",
        layer_norms="after",
    )
    return DecoderModel(arch, traits, placement)
