"""What configurations say of experts, under the names that families gave the same things."""

from __future__ import annotations

from pagefleet_protocol.model_config.shape import ModelShape

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.moe.routing import Routing
from pagefleet_engine.models.arch import ExpertsArch


def read_counts(shape: ModelShape) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token goes to.

    Raises:
        ModelLoadError: a token would go to more than there are.
    """
    fields, count = shape.fields, shape.num_experts
    top_k = shape.experts_per_token
    if top_k > count:
        raise ModelLoadError(f"{fields.source}: num_experts_per_tok is {top_k}, of {count} experts: repair the file")
    return count, top_k


def read_groups(shape: ModelShape, count: int, top_k: int) -> tuple[int, int]:
    """How many groups of neighbouring experts there are, and how many of them a token may choose from.

    Raises:
        ModelLoadError: the experts do not divide, or the chosen groups have too few of them.
    """
    fields = shape.fields
    groups, top_groups = fields.count("n_group", 1), fields.count("topk_group", 1)
    size = count // groups
    if count % groups or top_groups > groups or top_groups * size < top_k or (top_groups < groups and size < 2):
        raise ModelLoadError(
            f"{fields.source}: {top_k} of {count} experts from {top_groups} of {groups} groups (topk_group, n_group) "
            "cannot be: repair the file"
        )
    return groups, top_groups


def read_sigmoid_routing(shape: ModelShape) -> Routing:
    """DeepSeek-V3's: sigmoid gates, by groups; a token's weights add up to `routed_scaling_factor` where
    `norm_topk_prob` says so, as in every published model.

    Raises:
        ModelLoadError: the numbers do not fit each other.
    """
    fields, (count, top_k) = shape.fields, read_counts(shape)
    num_groups, top_groups = read_groups(shape, count, top_k)
    return Routing(
        num_experts=count,
        top_k=top_k,
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
    )


def drafting_layers(shape: ModelShape) -> tuple[str, ...]:
    """Beginnings of the names of layers that only draft (multi-token prediction), which follow the others."""
    num_drafting = shape.fields.count("num_nextn_predict_layers", 0, low=0)
    return tuple(f"model.layers.{shape.num_layers + layer}." for layer in range(num_drafting))


def read_experts(shape: ModelShape, routing: Routing, width: str, *, shared: int = 0, dense: int = 0) -> ExpertsArch:
    """Experts as wide as the field `width` says, in all layers but the first `dense`; `shared` is the width of what
    every token goes through."""
    layers = tuple(layer >= dense for layer in range(shape.num_layers))
    return ExpertsArch(
        routing=routing,
        intermediate_size=shape.fields.count(width),
        shared_intermediate_size=shared,
        layers=layers,
    )


def sparse_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Qwen's: every `decoder_sparse_step`th layer has experts, but for those in `mlp_only_layers`."""
    step, dense = shape.fields.count("decoder_sparse_step", 1), shape.fields.integers("mlp_only_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(shape.num_layers))
