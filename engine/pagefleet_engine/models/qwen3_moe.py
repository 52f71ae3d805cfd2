"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts, none of them shared."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts, sparse_layers


def read(shape: ModelShape) -> ModelArch:
    """A token's weights add up to one where `norm_topk_prob` says so, as in every published model."""
    count, top_k = read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=shape.fields.flag("norm_topk_prob", False))
    experts = read_experts(shape, routing, "moe_intermediate_size")
    return replace(read_shared(shape), mlp_bias=False, experts=replace(experts, layers=sparse_layers(shape)))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, query_key_norm="heads")
    return DecoderModel(arch, traits, placement)
