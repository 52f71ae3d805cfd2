"""GLM-4.5 to 4.7 (arXiv 2508.06471): experts chosen by sigmoid gates with a correction, after a few dense layers; heads
that rotate in part. Layers that only draft (multi-token prediction) are not loaded."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import drafting_layers, read_experts, read_sigmoid_routing


def read(shape: ModelShape) -> ModelArch:
    """The first `first_k_dense_replace` layers are dense."""
    fields, routing = shape.fields, read_sigmoid_routing(shape)
    shared = fields.count("n_shared_experts", 1, low=0) * fields.count("moe_intermediate_size")
    dense = fields.count("first_k_dense_replace", 1, low=0)
    return replace(
        read_shared(shape),
        query_key_norm=fields.flag("use_qk_norm", False),
        experts=read_experts(shape, routing, "moe_intermediate_size", shared=shared, dense=dense),
        unused_weights=drafting_layers(shape),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to query, key and value, and norms of queries and keys."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        query_key_norm="heads" if arch.query_key_norm else "none",
        router_correction=True,
    )
    return DecoderModel(arch, traits, placement)
