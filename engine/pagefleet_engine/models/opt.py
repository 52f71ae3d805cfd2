"""OPT (Zhang et al., arXiv 2205.01068): LayerNorm, learned positions from the third row of their table on, no gate; OPT
350M normalises the residual stream itself, and its embedding is narrower than its layers."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names

_OFFSET = 2


def read(shape: ModelShape) -> ModelArch:
    """`word_embed_proj_dim` is the embedding's width."""
    fields = shape.fields
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise ModelLoadError(
            f"{fields.source}: layer_norm_elementwise_affine is false; pagefleet runs OPT with it only"
        )
    fields.must_be_unset("_remove_final_layer_norm")
    width = fields.count("word_embed_proj_dim", shape.hidden_size)
    has_bias = fields.flag("enable_bias", True)
    return replace(
        read_shared(
            shape,
            activation_field="activation_function",
            intermediate_size=fields.count("ffn_dim"),
            ropes=(NO_ROPE,),
        ),
        rms_norm_eps=1e-5,
        mlp_gate=False,
        position_rows=shape.context_length + _OFFSET,
        position_offset=_OFFSET,
        embedding_size=None if width == shape.hidden_size else width,
        attention_bias=has_bias,
        mlp_bias=has_bias,
        layer_norms="before" if fields.flag("do_layer_norm_before", True) else "of sums",
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Norms always have a bias, matrices unless the configuration says otherwise."""
    traits = Traits(
        norm="layer",
        layer_norms=arch.layer_norms,
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        mlp_bias=arch.mlp_bias,
        names=Names(
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            project_in="model.decoder.project_in",
            project_out="model.decoder.project_out",
            layers="model.decoder.layers",
            norm="model.decoder.final_layer_norm",
            input_norm="self_attn_layer_norm",
            post_attention_norm="final_layer_norm",
            mlp="",
            output="out_proj",
            up="fc1",
            down="fc2",
        ),
    )
    return DecoderModel(arch, traits, placement)
