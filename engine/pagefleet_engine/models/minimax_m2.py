"""MiniMax-M2 (MiniMax, 2025): experts in every layer, chosen by sigmoid gates with a correction; queries and keys are
normalised as a whole, and heads rotate in part. Layers that only draft (multi-token prediction) are not loaded."""

from __future__ import annotations

from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.expert_slots import ExpertNames
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import drafting_layers, read_experts, read_sigmoid_routing
from pagefleet_engine.models.rope_config import read_rope


def read(shape: ModelShape) -> ModelArch:
    """Published files say by `rotary_dim` how much of a head rotates.

    Raises:
        ModelLoadError: queries and keys are not normalised so.
    """
    fields = shape.fields
    if not fields.flag("use_qk_norm", True) or fields.text("qk_norm_type", "per_layer") != "per_layer":
        raise ModelLoadError(
            f"{fields.source}: use_qk_norm must be true and qk_norm_type per_layer, as in MiniMax-M2: other norms are "
            "not run"
        )
    rotary = fields
    if fields.present("rotary_dim"):
        share = fields.count("rotary_dim", high=shape.head_dim) / shape.head_dim
        rotary = fields.with_defaults({"partial_rotary_factor": share})
    routing = read_sigmoid_routing(shape)
    return replace(
        read_shared(shape, ropes=(read_rope(rotary, shape.head_dim),)),
        experts=read_experts(shape, routing, "intermediate_size"),
        unused_weights=drafting_layers(shape),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """There are no biases, whatever the configuration says."""
    names = ExpertNames(
        block="block_sparse_moe",
        correction="e_score_correction_bias",
        gate_up="experts.{}.w13",
        down="experts.{}.w2",
    )
    return DecoderModel(arch, Traits(query_key_norm="projection", router_correction=True, experts=names), placement)
