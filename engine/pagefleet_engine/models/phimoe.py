"""Phi-3.5-MoE (arXiv 2404.14219, 2409.12136): LayerNorm, biases, and experts that SparseMixer chooses."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.expert_slots import ExpertNames
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts


def read(shape: ModelShape) -> ModelArch:
    """SparseMixer chooses two experts."""
    fields, (count, top_k) = shape.fields, read_counts(shape)
    if top_k != 2:
        raise ModelLoadError(f"{fields.source}: num_experts_per_tok is {top_k}; SparseMixer chooses 2: repair the file")
    routing = Routing(
        num_experts=count, top_k=top_k, scoring="sparsemixer", jitter=fields.number("router_jitter_noise", 0.01)
    )
    return replace(
        read_shared(shape),
        mlp_bias=False,
        head_bias=fields.flag("lm_head_bias", False),
        experts=read_experts(shape, routing, "intermediate_size"),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention and to the head."""
    traits = Traits(
        norm="layer",
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        experts=ExpertNames(block="block_sparse_moe", gate_up="experts.{}.w13", down="experts.{}.w2"),
    )
    return DecoderModel(arch, traits, placement)
