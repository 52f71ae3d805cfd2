"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434): attention over latents, experts chosen by softmax gates, by groups in the
large one."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.models.blocks import Traits
from pagefleet_engine.models.decoder import DecoderModel
from pagefleet_engine.models.experts_config import read_counts, read_groups
from pagefleet_engine.models.latent_config import read_deepseek


def read(shape: ModelShape) -> ModelArch:
    """Weights are what the scores of all experts left a token's, times `routed_scaling_factor`.

    Raises:
        ModelLoadError: experts are chosen in another way.
    """
    fields, (count, top_k) = shape.fields, read_counts(shape)
    method, scoring = fields.text("topk_method", "greedy"), fields.text("scoring_func", "softmax")
    if method not in ("greedy", "group_limited_greedy") or scoring != "softmax":
        raise ModelLoadError(
            f"{fields.source}: topk_method is {method} with scoring_func {scoring}; pagefleet runs greedy and "
            "group_limited_greedy with softmax"
        )
    num_groups, top_groups = read_groups(shape, count, top_k) if method == "group_limited_greedy" else (1, 1)
    routing = Routing(
        num_experts=count,
        top_k=top_k,
        renormalize=fields.flag("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="max",
    )
    return read_deepseek(shape, routing)


def build(arch: ModelArch, placement: Placement) -> DecoderModel:
    """A configuration may add biases to the MLPs."""
    return DecoderModel(arch, Traits(mlp_bias=arch.mlp_bias), placement)
