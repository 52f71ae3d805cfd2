"""ERNIE 4.5 with experts (Baidu, 2025), chosen by softmax gates with a correction. What only drafts (multi-token
prediction) is not loaded."""

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
    """Every `moe_layer_interval`th layer has experts, from `moe_layer_start_index` to `moe_layer_end_index`."""
    fields, (count, top_k) = shape.fields, read_counts(shape)
    fields.must_be_unset("use_bias")
    routing = Routing(num_experts=count, top_k=top_k, renormalize=True)
    shared = fields.count("moe_num_shared_experts", low=0) * fields.count("moe_intermediate_size")
    experts = read_experts(shape, routing, "moe_intermediate_size", shared=shared)
    return replace(
        read_shared(shape),
        attention_bias=False,
        mlp_bias=False,
        experts=replace(experts, layers=_sparse(shape)),
        unused_weights=("model.mtp_",),
    )


def _sparse(shape: ModelShape) -> tuple[bool, ...]:
    fields, layers = shape.fields, shape.num_layers
    first, step = fields.count("moe_layer_start_index", low=0), fields.count("moe_layer_interval")
    last = fields.count("moe_layer_end_index", layers - 1, low=-1)
    last = layers - 1 if last == -1 else last
    return tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(layers))


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """Without biases, as published."""
    names = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_is_row=True)
    return DecoderModel(arch, Traits(interleaved_rotation=True, router_correction=True, experts=names), placement)
