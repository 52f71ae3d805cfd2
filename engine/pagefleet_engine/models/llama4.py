"""Llama 4 (Meta, 2025), its text model: layers that rotate and see their chunk of the context, layers that do neither,
and experts whose weights multiply what they read, beside one that every token goes through.

A checkpoint of text and images (`model_type` llama4) is served as a text model; its vision weights are not loaded.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from pagefleet_protocol.model_config.fields import ConfigFields, ModelConfigError
from pagefleet_protocol.model_config.shape import ModelShape, rotated_layers

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.expert_slots import ExpertNames, Stacked
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.rotary_frequencies import NO_ROPE
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ExpertsArch, ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts
from pagefleet_engine.models.names import Names
from pagefleet_engine.models.rope_config import read_rope

_log = logging.getLogger(__name__)


def read(shape: ModelShape) -> ModelArch:
    """Of a configuration for text and images the part about text counts, and both name ends of a text.

    Raises:
        ModelLoadError: heads are rotated in a way that changes how long they are.
    """
    fields, (count, top_k) = shape.fields, read_counts(shape)
    rope, still = read_rope(fields, shape.head_dim), NO_ROPE
    has_norm = fields.flag("use_qk_norm", True)
    if has_norm and rope.magnitude != 1.0:  # normalised after they are rotated, as far as the file goes
        raise ModelLoadError(
            f"{fields.source}: rope_type is {rope.rope_type}; with use_qk_norm pagefleet runs default, linear, dynamic "
            "and llama3"
        )
    if _grows(fields):
        still = replace(still, query_growth=fields.number("attn_scale"), growth_step=fields.number("floor_scale"))
    width = fields.count("intermediate_size")
    experts = ExpertsArch(
        routing=Routing(num_experts=count, top_k=top_k, scoring="sigmoid", scales_inputs=True),
        intermediate_size=width,
        shared_intermediate_size=width,
        layers=_sparse(fields, shape.num_layers),
    )
    ends = (*shape.outer.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))
    return replace(
        read_shared(shape, intermediate_size=fields.count("intermediate_size_mlp"), ropes=(rope, still)),
        layer_ropes=tuple(0 if rotates else 1 for rotates in rotated_layers(fields, shape.num_layers)),
        mlp_bias=False,
        query_key_norm=has_norm,
        experts=experts if any(experts.layers) else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to all of attention, and norms of rotated heads."""
    if arch.model_type == "llama4":
        _log.info("llama4: only the text model is loaded, requests cannot contain images")
    names = ExpertNames(block="feed_forward", router="router", shared="shared_expert")
    if not (arch.gguf_layout or _in_8_bits(arch)):
        gate_up, down = (Stacked(f"experts.{name}", transposed=True) for name in ("gate_up_proj", "down_proj"))
        names = replace(names, gate_up=gate_up, down=down)
    traits = Traits(
        qkv_bias=arch.attention_bias,
        output_bias=arch.attention_bias,
        # A head is as long before it is rotated as after.
        query_key_norm="rotated heads" if arch.query_key_norm else "none",
        interleaved_rotation=True,
        names=Names(mlp="feed_forward"),
        experts=names,
    )
    return DecoderModel(arch, traits, placement)


def _in_8_bits(arch: ModelArch) -> bool:
    """Whether the checkpoint is quantized: then it has each expert apart, as any linear layers."""
    return arch.quantization is not None and any(not rule.scheme.on_load for rule in arch.quantization.rules)


def _grows(fields: ConfigFields) -> bool:
    """Whether queries that do not rotate grow; the first files have a number for it."""
    try:
        return fields.count("attn_temperature_tuning", 1, low=0) > 0
    except ModelConfigError:
        return fields.flag("attn_temperature_tuning", True)


def _sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """`moe_layers`, or every `interleave_moe_layer_step`th."""
    if fields.present("moe_layers"):
        sparse = fields.integers("moe_layers")
        return tuple(layer in sparse for layer in range(num_layers))
    step = fields.count("interleave_moe_layer_step")
    return tuple((layer + 1) % step == 0 for layer in range(num_layers))
