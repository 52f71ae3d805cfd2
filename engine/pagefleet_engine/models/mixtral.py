"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in the place of every MLP."""

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


def read(shape: ModelShape) -> ModelArch:
    """A token's weights add up to one."""
    count, top_k = read_counts(shape)
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    return replace(read_shared(shape), experts=read_experts(shape, routing, "intermediate_size"))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """There are no biases, whatever the configuration says."""
    names = ExpertNames(block="block_sparse_moe", gate_up="experts.{}.w13", down="experts.{}.w2")
    return DecoderModel(arch, Traits(experts=names), placement)
