"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, an MLP without a gate, and matrices with a row for each
input in the checkpoint, which GGUF turns."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """A table of as many positions as the context has."""
    fields = shape.fields
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.must_be_unset(name)
    shared = read_shared(
        shape,
        activation_field="activation_function",
        eps_field="layer_norm_epsilon",
        intermediate_size=fields.count("n_inner", 4 * shape.hidden_size),
        ropes=(NO_ROPE,),
    )
    return replace(
        shared,
        mlp_gate=False,
        position_rows=shape.context_length,
        query_scale=shared.query_scale if fields.flag("scale_attn_weights", True) else 1.0,
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Everything has a bias but the head."""
    traits = Traits(
        norm="layer",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        merged_in_checkpoint=True,
        transposed=not arch.gguf_layout,
        names=Names(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            input_norm="ln_1",
            attention="attn",
            post_attention_norm="ln_2",
            qkv="c_attn",
            output="c_proj",
            up="c_fc",
            down="c_proj",
        ),
    )
    return DecoderModel(arch, traits, placement)
