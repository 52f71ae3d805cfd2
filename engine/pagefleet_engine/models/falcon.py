"""Falcon (Almazrouei et al., arXiv 2311.16867): attention and MLP side by side; 7B with one key/value head, 11B, 40B
and 180B with groups of heads; the RefinedWeb models have ALiBi, and one after the other."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.alibi import alibi_slopes
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """Biases of ALiBi are scaled as scores are."""
    fields = shape.fields
    has_alibi, is_new = fields.flag("alibi", False), fields.flag("new_decoder_architecture", False)
    shared = read_shared(
        shape,
        activation_field="activation",
        eps_field="layer_norm_epsilon",
        intermediate_size=fields.count("ffn_hidden_size", 4 * shape.hidden_size),
        ropes=(NO_ROPE,) if has_alibi else None,
    )
    norms = fields.count("num_ln_in_parallel_attn", 2 if is_new else 1, high=2)
    slopes = tuple(slope * shared.query_scale for slope in alibi_slopes(shape.num_heads)) if has_alibi else ()
    has_bias = fields.flag("bias", False)
    return replace(
        shared,
        mlp_gate=False,
        alibi_slopes=slopes,
        attention_bias=has_bias,
        mlp_bias=has_bias,
        layer_norms=("apart" if norms == 2 else "shared") if is_new or fields.flag("parallel_attn", True) else "before",
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all matrices of layers."""
    apart = arch.layer_norms == "apart"
    mlp_norm = "input_layernorm" if arch.gguf_layout else "ln_mlp"  # one name for it and for the only one of others
    traits = Traits(
        norm="layer",
        layer_norms=arch.layer_norms,
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        mlp_bias=arch.mlp_bias,
        merged_in_checkpoint=True,
        heads_in_groups=not arch.gguf_layout,
        names=Names(
            embedding="transformer.word_embeddings",
            layers="transformer.h",
            norm="transformer.ln_f",
            input_norm="ln_attn" if apart else "input_layernorm",
            attention="self_attention",
            post_attention_norm=mlp_norm if apart else "post_attention_layernorm",
            qkv="query_key_value",
            output="dense",
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
    )
    return DecoderModel(arch, traits, placement)
