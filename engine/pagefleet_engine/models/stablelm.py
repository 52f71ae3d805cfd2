"""StableLM 3B, Zephyr and StableLM 2 (arXiv 2402.17834): Llama with LayerNorm and heads that rotate in part; 12B has a
norm for each head, and attention and MLP side by side."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """`use_parallel_residual` puts attention and MLP side by side."""
    fields = shape.fields
    return replace(
        read_shared(shape, eps_field="layer_norm_eps"),
        attention_bias=fields.flag("use_qkv_bias", False),
        mlp_bias=False,
        query_key_norm=fields.flag("qk_layernorm", False),
        layer_norms="shared" if fields.flag("use_parallel_residual", False) else "before",
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Queries, keys and values may have biases, other matrices have none."""
    traits = Traits(
        norm="layer",
        layer_norms=arch.layer_norms,
        qkv_bias=arch.attention_bias,
        query_key_norm=("stacked layer" if arch.gguf_layout else "layer") if arch.query_key_norm else "none",
        names=Names(q_norm="q_layernorm", k_norm="k_layernorm"),
    )
    return DecoderModel(arch, traits, placement)
