"""Where min-p, top-k and top-p cut a distribution: one threshold per row, found without sorting the vocabulary.

All three keep the most likely tokens, so each is a lower bound on the score, and the highest bound decides. Tokens of
equal score are kept or dropped together: the outcome hangs neither on the order of ties nor on the other rows.

Shapes: R rows, V vocabulary, C candidates (the C highest scores of a row).
"""

from __future__ import annotations

import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")

CANDIDATES = (64, 256, 1024)
"""Sizes of candidate lists; rows that need more are cut over the whole vocabulary."""

_TOP_P_ALONE = 256
"""Candidates that hold top-p of most language-model distributions."""

_LOWEST = -104.0
"""exp() of less is 0 in float32."""

_BISECTIONS = 32
"""Halvings of [_LOWEST, 0]: down to 2.4e-8, under float32's steps for nearly all scores."""


def num_candidates(top_k: int, top_p: float) -> int | None:
    """Length of the list that probably holds every token the row may draw; None: look at the whole vocabulary.

    A function of the row's own parameters only, so that a row takes the same path in every batch. `top_k` 0 is off.
    """
    wanted = top_k if top_k > 0 else _TOP_P_ALONE if top_p < 1.0 else None
    if wanted is None:
        return None
    return next((size for size in CANDIDATES if size > wanted), None)


class Cuts:
    """The three parameters of R rows, on the device."""

    def __init__(self, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> None:
        """`top_k_R`: int64, 0 off; `top_p_R`: float64, 1 off; `log_min_p_R`: float32, -inf off."""
        self.top_k_R = top_k_R
        self.top_p_R = top_p_R
        self.log_min_p_R = log_min_p_R

    def select(self, index: Tensor) -> Cuts:
        """The same for some of the rows."""
        return Cuts(self.top_k_R[index], self.top_p_R[index], self.log_min_p_R[index])


def cut_candidates(scores_RV: Tensor, values_RC: Tensor, cuts: Cuts, *, by_top_k: bool) -> tuple[Tensor, Tensor]:
    """Threshold of each row from its highest scores.

    Args:
        scores_RV: float32, shifted so that each row's maximum is 0.
        values_RC: the C highest of each row, falling.
        cuts: the rows' parameters.
        by_top_k: all rows have a top-k under C; otherwise none has, and all have a top-p.

    Returns:
        threshold_R: scores from here up are kept.
        complete_R: bool, False where the list is too short to hold all kept scores: use `cut_vocabulary`.
    """
    num_columns = values_RC.shape[1]
    threshold_R = cuts.log_min_p_R
    if by_top_k:
        last_kept_R1 = cuts.top_k_R.clamp(1, num_columns).sub_(1).unsqueeze(1)
        threshold_R = torch.maximum(threshold_R, values_RC.gather(1, last_kept_R1).squeeze(1))
    whole_row = num_columns == scores_RV.shape[1]
    holds_all_R = torch.ones_like(threshold_R, dtype=torch.bool) if whole_row else values_RC[:, -1] < threshold_R

    weights_RC = values_RC.double().exp_().mul_(values_RC >= threshold_R.unsqueeze(1))
    running_RC = weights_RC.cumsum(1)
    total_R = running_RC[:, -1] if by_top_k or whole_row else _mass(scores_RV, threshold_R)
    # The token that reaches the target is the last one kept.
    crossing_R = (running_RC < (cuts.top_p_R * total_R).unsqueeze(1)).sum(1)
    top_p_bound_R = values_RC.gather(1, crossing_R.clamp(max=num_columns - 1).unsqueeze(1)).squeeze(1)
    cut_R = (cuts.top_p_R < 1.0) & (crossing_R < num_columns)
    threshold_R = torch.where(cut_R, torch.maximum(threshold_R, top_p_bound_R), threshold_R)
    if by_top_k:
        return threshold_R, holds_all_R
    return threshold_R, holds_all_R | (cut_R & (values_RC[:, -1] < threshold_R))


def cut_vocabulary(scores_RV: Tensor, cuts: Cuts) -> Tensor:
    """Threshold of each row [R] by looking at all scores; `scores_RV` as in `cut_candidates`."""
    threshold_R = torch.maximum(_kth_highest(scores_RV, cuts.top_k_R), cuts.log_min_p_R)
    if not bool((cuts.top_p_R < 1.0).any()):
        return threshold_R
    weights_RV = torch.where(scores_RV >= threshold_R.unsqueeze(1), scores_RV, NEGATIVE_INFINITY).exp_()
    target_R = cuts.top_p_R * weights_RV.sum(1)
    low_R = torch.full_like(threshold_R, _LOWEST)
    high_R = torch.zeros_like(threshold_R)
    for _ in range(_BISECTIONS):
        middle_R = (low_R + high_R) / 2
        enough_R = (weights_RV * (scores_RV >= middle_R.unsqueeze(1))).sum(1) >= target_R
        low_R = torch.where(enough_R, middle_R, low_R)
        high_R = torch.where(enough_R, high_R, middle_R)
    return torch.where(cuts.top_p_R < 1.0, torch.maximum(threshold_R, low_R), threshold_R)


def _kth_highest(scores_RV: Tensor, top_k_R: Tensor) -> Tensor:
    largest = min(int(top_k_R.max()), scores_RV.shape[1])
    if largest < 1:
        return torch.full_like(scores_RV[:, 0], NEGATIVE_INFINITY)
    values_RC = scores_RV.topk(largest, dim=1).values
    index_R1 = top_k_R.clamp(1, largest).sub_(1).unsqueeze(1)
    return torch.where(top_k_R > 0, values_RC.gather(1, index_R1).squeeze(1), NEGATIVE_INFINITY)


def _mass(scores_RV: Tensor, threshold_R: Tensor) -> Tensor:
    """Sum of exp(score) over the scores from the threshold up; float64 [R]."""
    kept_RV = torch.where(scores_RV >= threshold_R.unsqueeze(1), scores_RV, NEGATIVE_INFINITY)
    # The most likely token has weight 1. Softmax adds up each row by itself, so the batch cannot change the last bit.
    return kept_RV.softmax(1).amax(1).double().reciprocal_()
