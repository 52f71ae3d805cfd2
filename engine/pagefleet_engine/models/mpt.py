"""MPT (MosaicML, 2023): LayerNorm, ALiBi, an MLP without a gate, and no biases."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.alibi import mosaic_slopes
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """`attn_config` says how scores are scaled and biased."""
    fields, attention = shape.fields, shape.fields.section("attn_config")
    for name in ("prefix_lm", "qk_ln", "qk_gn", "attn_uses_sequence_id", "rope"):
        attention.must_be_unset(name)
    fields.must_be_unset("logit_scale")
    kind = attention.text("attn_type", "multihead_attention")
    if not (attention.flag("alibi", True) and fields.flag("no_bias", True) and kind == "multihead_attention"):
        raise ModelLoadError(f"{fields.source}: pagefleet runs MPT with ALiBi, multihead_attention and no_bias only")
    width = fields.count("expansion_ratio", 4) * shape.hidden_size
    shared = read_shared(shape, eps_field="layer_norm_epsilon", intermediate_size=width, ropes=(NO_ROPE,))
    return replace(
        shared,
        activation="gelu",
        mlp_gate=False,
        query_scale=attention.number("softmax_scale", shared.query_scale),
        clip_qkv=attention.optional_number("clip_qkv"),
        alibi_slopes=mosaic_slopes(shape.num_heads, attention.number("alibi_bias_max", 8.0)),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """No biases, not even of norms."""
    traits = Traits(
        norm="layer",
        norm_bias=False,
        merged_in_checkpoint=True,
        names=Names(
            embedding="transformer.wte",
            layers="transformer.blocks",
            norm="transformer.norm_f",
            input_norm="norm_1",
            attention="attn",
            post_attention_norm="norm_2",
            mlp="ffn",
            qkv="Wqkv",
            output="out_proj",
        ),
    )
    return DecoderModel(arch, traits, placement)
