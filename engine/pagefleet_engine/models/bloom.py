"""BLOOM (arXiv 2211.05100): LayerNorm, also of the embedding, and ALiBi in the place of positions."""

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
    """The activation is GELU's tanh form, whatever the file says."""
    shape.fields.must_be_unset("apply_residual_connection_post_layernorm")
    return replace(
        read_shared(shape, eps_field="layer_norm_epsilon", intermediate_size=4 * shape.hidden_size, ropes=(NO_ROPE,)),
        activation="gelu_tanh",
        mlp_gate=False,
        alibi_slopes=alibi_slopes(shape.num_heads),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Everything has a bias but the head."""
    traits = Traits(
        norm="layer",
        embedding_norm=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        merged_in_checkpoint=True,
        heads_in_groups=not arch.gguf_layout,
        names=Names(
            embedding="transformer.word_embeddings",
            embedding_norm="transformer.word_embeddings_layernorm",
            layers="transformer.h",
            norm="transformer.ln_f",
            attention="self_attention",
            qkv="query_key_value",
            output="dense",
            up="dense_h_to_4h",
            down="dense_4h_to_h",
        ),
    )
    return DecoderModel(arch, traits, placement)
