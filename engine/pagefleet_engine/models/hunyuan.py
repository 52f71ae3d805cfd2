"""Hunyuan, dense and with experts (Tencent, 2025): Llama that normalises each query and key head after it is rotated;
with experts, softmax gates, and an MLP for every token besides."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.moe.expert_slots import ExpertNames
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts
from pagefleet_engine.models.names import Names


def read(shape: ModelShape) -> ModelArch:
    """Experts, and the MLP beside them, are as wide as an MLP of the dense kind."""
    shape.fields.must_be_unset("use_cla")
    arch = replace(read_shared(shape), mlp_bias=False)
    if not shape.num_experts:
        return arch
    count, top_k = read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    return replace(arch, experts=read_experts(shape, routing, "intermediate_size", shared=arch.intermediate_size))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        query_key_norm="turned heads",
        names=Names(q_norm="query_layernorm", k_norm="key_layernorm"),
        experts=ExpertNames(router="gate.wg", shared="shared_mlp"),
    )
    return DecoderModel(arch, traits, placement)
