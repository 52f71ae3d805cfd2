"""Granite 3.0 and 3.1 MoE: Granite with experts, whose matrices are stacked in the checkpoint."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.layers.moe.expert_slots import ExpertNames, Stacked
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models import granite
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_experts

_APART = ExpertNames(block="block_sparse_moe", router="router.layer")
_STACKED = replace(_APART, gate_up=Stacked("input_linear"), down=Stacked("output_linear"))


def read(shape: ModelShape) -> ModelArch:
    """A softmax over a token's own experts is one over all of them whose weights are made to add up to one."""
    count, top_k = read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    return replace(
        granite.read(shape),
        mlp_bias=False,
        experts=read_experts(shape, routing, "intermediate_size"),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention."""
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        embedding_scale=arch.embedding_scale,
        experts=_APART if arch.gguf_layout else _STACKED,
    )
    return DecoderModel(arch, traits, placement)
