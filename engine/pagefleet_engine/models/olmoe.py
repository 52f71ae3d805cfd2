"""OLMoE (arXiv 2409.02060): Llama with experts, and norms of queries and keys as a whole."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts


def read(shape: ModelShape) -> ModelArch:
    """Weights are what the softmax left them, unless `norm_topk_prob` says otherwise."""
    shape.fields.must_be_unset("clip_qkv")
    count, top_k = read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=shape.fields.flag("norm_topk_prob", False))
    return replace(read_shared(shape), experts=read_experts(shape, routing, "intermediate_size"))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(qkv_bias=arch.attention_bias, output_bias=arch.attention_bias, query_key_norm="projection")
    return DecoderModel(arch, traits, placement)
