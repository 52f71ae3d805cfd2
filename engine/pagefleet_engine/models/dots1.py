"""dots.llm1 (arXiv 2506.05767): Qwen 3's attention, and experts as DeepSeek-V3 chooses them."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_experts, read_sigmoid_routing


def read(shape: ModelShape) -> ModelArch:
    """The first `first_k_dense_replace` layers are dense."""
    fields, routing = shape.fields, read_sigmoid_routing(shape)
    shared = fields.count("n_shared_experts", 0, low=0) * fields.count("moe_intermediate_size")
    dense = fields.count("first_k_dense_replace", 0, low=0)
    experts = read_experts(shape, routing, "moe_intermediate_size", shared=shared, dense=dense)
    return replace(read_shared(shape), mlp_bias=False, experts=experts)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="heads",
        router_correction=True,
    )
    return DecoderModel(arch, traits, placement)
