"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): Qwen2 with experts, and a shared one that has a gate."""

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
from pagefleet_engine.models.experts_config import read_counts, read_experts, sparse_layers


def read(shape: ModelShape) -> ModelArch:
    """Weights are what the softmax left them, unless `norm_topk_prob` says otherwise."""
    fields, (count, top_k) = shape.fields, read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=fields.flag("norm_topk_prob", False))
    shared = fields.count("shared_expert_intermediate_size")
    experts = read_experts(shape, routing, "moe_intermediate_size", shared=shared)
    arch = read_shared(shape)
    bias = fields.flag("qkv_bias", True)
    return replace(arch, attention_bias=bias, experts=replace(experts, layers=sparse_layers(shape)))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Biases on query, key and value only."""
    traits = Traits(qkv_bias=arch.attention_bias, experts=ExpertNames(shared="shared_expert"), shared_expert_gate=True)
    return DecoderModel(arch, traits, placement)
