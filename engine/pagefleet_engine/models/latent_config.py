"""What DeepSeek's configurations say, of attention over latents and of experts."""

from __future__ import annotations

import math
from dataclasses import replace

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.models.arch import LatentArch, ModelArch
from pagefleet_engine.models.config_file import read_shared
from pagefleet_engine.models.experts_config import drafting_layers, read_experts
from pagefleet_engine.models.rope_config import read_rope


def read_deepseek(shape: ModelShape, routing: Routing) -> ModelArch:
    """All but how experts are chosen: the first `first_k_dense_replace` layers have none, or those that
    `mlp_layer_types` calls dense.

    Raises:
        ModelLoadError: experts are not in each of the others.
    """
    fields = shape.fields
    if fields.count("moe_layer_freq", 1) != 1:
        raise ModelLoadError(
            f"{fields.source}: moe_layer_freq is {fields.count('moe_layer_freq')}; pagefleet runs models that have "
            "experts in every layer after the first first_k_dense_replace"
        )
    latent = LatentArch(
        rank=fields.count("kv_lora_rank"),
        query_rank=fields.count("q_lora_rank") if fields.present("q_lora_rank") else None,
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        maps_apart=fields.flag("kv_b_apart", False),
    )
    shared = fields.count("n_shared_experts", 1, low=0) * fields.count("moe_intermediate_size")
    dense = fields.count("first_k_dense_replace", 0, low=0)
    experts = read_experts(shape, routing, "moe_intermediate_size", shared=shared, dense=dense)
    if (kinds := fields.choices("mlp_layer_types", shape.num_layers, ("dense", "sparse"))) is not None:
        experts = replace(experts, layers=tuple(kind == "sparse" for kind in kinds))
    return replace(
        read_shared(shape, ropes=(read_rope(fields, latent.rope_dim),)),
        query_scale=_query_scale(shape),
        latent=latent,
        experts=experts,
        unused_weights=drafting_layers(shape),
    )


def _query_scale(shape: ModelShape) -> float:
    """That of a head, and where the rotation is stretched the square of YaRN's `0.1 mscale ln(factor) + 1`."""
    fields = shape.fields
    scaling = fields.section("rope_parameters" if fields.present("rope_parameters") else "rope_scaling")
    scale: float = shape.head_dim**-0.5
    mscale, factor = scaling.optional_number("mscale_all_dim"), scaling.number("factor", 1.0)
    if mscale is None or factor <= 1.0 or scaling.text("rope_type", scaling.text("type", "default")) == "default":
        return scale
    return scale * (0.1 * mscale * math.log(factor) + 1.0) ** 2
