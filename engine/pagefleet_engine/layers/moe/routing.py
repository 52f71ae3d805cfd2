"""Which experts a token goes to, and with what weights: a pure function of the router's logits.

Softmax gates as in Mixtral (arXiv 2401.04088) and Qwen; sigmoid gates with a correction that only chooses, and experts
in groups, as in DeepSeek-V3 (arXiv 2412.19437); SparseMixer's two choices (arXiv 2409.12136) as in Phi-3.5-MoE.

Shapes: T tokens, E experts, G groups of them, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.routing import NativeRouter
from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]

GroupScore = Literal["max", "top2"]

NOWHERE = -1
"""The expert of a row that is padding."""
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a model's routers choose."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    scoring: Scoring = "softmax"
    renormalize: bool = False
    """A token's weights add up to `scale`; else they are what the scores of all experts left them."""
    scale: float = 1.0
    """Of the weights."""
    num_groups: int = 1
    top_groups: int = 1
    """Groups of neighbouring experts that a token may choose from."""
    group_score: GroupScore = "top2"
    """What ranks a group: its best expert, or the sum of its best two."""
    scales_inputs: bool = False
    """Weights multiply what an expert reads, not what it gives."""
    jitter: float = 0.0
    """SparseMixer: scores further below the best than twice this share of it take no part."""

    @property
    def best_of_group(self) -> int:
        """Experts whose scores rank a group."""
        return 1 if self.group_score == "max" else 2


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where each row goes."""

    weights_TK: Tensor
    """float32."""
    experts_TK: Tensor
    """int32; all different in a row, or all NOWHERE."""

    def without(self, padding_T: Tensor) -> Routes:
        """The same, rows of padding nowhere; `padding_T` is bool."""
        return Routes(self.weights_TK, self.experts_TK.masked_fill(padding_T[:, None], NOWHERE))


def route(logits_TE: Tensor, routing: Routing, correction_E: Tensor | None = None) -> Routes:
    """Choose by the router's logits, of any floating type; `correction_E` is added to scores for the choice alone.

    A row whose logits are no numbers goes somewhere, with weights that are none.
    """
    logits_TE = logits_TE.to(torch.float32)
    if routing.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, routing.jitter)
    scores_TE = logits_TE.softmax(-1) if routing.scoring == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routing.scoring == "sigmoid" and correction_E is None and routing.num_groups == 1:
        choice_TE = logits_TE  # these still differ where scores are one
    if routing.top_groups < routing.num_groups:
        choice_TE = _within_best_groups(choice_TE, routing)
    experts_TK = choice_TE.topk(routing.top_k, -1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if routing.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _SMALLEST_SUM)
    if routing.scale != 1.0:
        weights_TK = weights_TK * routing.scale
    return Routes(weights_TK, experts_TK.to(torch.int32))


def chooser(
    routing: Routing, native: Library | None = None, correction_E: Tensor | None = None
) -> Callable[[Tensor], Routes]:
    """`route` of logits, by compiled kernels where they are there for it."""
    if native is None or routing.scoring == "sparsemixer" or routing.num_experts > native.most_experts:
        return lambda logits_TE: route(logits_TE, routing, correction_E)
    router = NativeRouter(
        native,
        routing.num_experts,
        routing.top_k,
        routing.scoring,
        renormalize=routing.renormalize,
        scale=routing.scale,
        groups=(routing.num_groups, routing.top_groups, routing.best_of_group),
        correction_E=correction_E,
    )
    return lambda logits_TE: Routes(*router(logits_TE))


def _within_best_groups(choice_TE: Tensor, routing: Routing) -> Tensor:
    """The same, experts of groups that are not among the best hidden."""
    grouped_TGe = choice_TE.view(-1, routing.num_groups, choice_TE.shape[-1] // routing.num_groups)
    ranks_TG = grouped_TGe.topk(routing.best_of_group, -1).values.sum(-1)
    chosen_TG = ranks_TG.topk(routing.top_groups, -1).indices
    hidden_TG = torch.ones_like(ranks_TG, dtype=torch.bool).scatter_(-1, chosen_TG, False)
    return grouped_TGe.masked_fill(hidden_TG[..., None], -torch.inf).flatten(-2)


def _sparsemixer(logits_TE: Tensor, jitter: float) -> Routes:
    """The best expert and the best of the others, each weighed among the scores that come near it."""
    weights, experts = [], []
    left_TE = logits_TE
    for _ in range(2):
        best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
        distance_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
        near_TE = left_TE.masked_fill(distance_TE > 2 * jitter, -torch.inf)
        weights.append(near_TE.softmax(-1).gather(-1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(-1, expert_T1, -torch.inf)
    return Routes(torch.cat(weights, -1), torch.cat(experts, -1).to(torch.int32))
