"""Gemma 2 (arXiv 2408.00118): norms around attention and MLP, soft caps, every other layer with a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_fields import ConfigFields
from pagefleet_engine.models.config_shared import named_windows, read_shared
from pagefleet_engine.models.decoder import DecoderModel

# transformers.Gemma2Config
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "eos_token_id": 1,
}


def read(fields: ConfigFields) -> ModelArch:
    """Even layers slide unless `layer_types` says otherwise."""
    fields = fields.with_defaults(_DEFAULTS)
    fields.must_be_unset("use_bidirectional_attention")
    arch = read_shared(fields, activation_field="hidden_activation")
    kinds = fields.layer_types(arch.num_layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(arch.num_layers)
    ]
    return replace(
        arch,
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
        windows=named_windows(fields, kinds),
        mlp_bias=False,
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        layer_norms="around",
        norm_unit_offset=True,
        embedding_scale=arch.hidden_size**0.5,
    )
    return DecoderModel(arch, traits, placement)
