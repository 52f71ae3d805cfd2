"""Gemma 2 (arXiv 2408.00118): norms around attention and MLP, soft caps, every other layer with a window."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel


def read(shape: ModelShape) -> ModelArch:
    """Even layers slide unless `layer_types` says otherwise."""
    fields = shape.fields
    fields.must_be_unset("use_bidirectional_attention")
    return replace(
        read_shared(shape, activation_field="hidden_activation"),
        query_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
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
