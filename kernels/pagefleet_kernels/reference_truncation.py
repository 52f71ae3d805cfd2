"""The twin of `sampling_truncation`: where min-p, top-k and top-p cut, mostly found from the highest scores of a row.

All three keep the most likely tokens, so each is a lower bound on the score, and the highest bound decides. Tokens of
equal score are kept or dropped together: the outcome hangs neither on the order of ties nor on the other rows.

Shapes: R rows, V vocabulary, C candidates (the C highest scores of a row).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEGATIVE_INFINITY = float("-inf")

CANDIDATES = (64, 256, 1024)
"""Sizes of candidate lists; rows that need more are cut over the whole vocabulary."""

_TOP_P_ALONE = 256
"""Candidates that hold top-p of most language-model distributions."""


def num_candidates(top_k: int, top_p: float) -> int | None:
    """Length of the list that probably holds every token the row may draw; None: look at the whole vocabulary.

    A function of the row's own parameters only, so that a row takes the same path in every batch. `top_k` 0 is off.
    """
    if top_k == 0:
        return _TOP_P_ALONE if top_p < 1.0 else None
    # One more than k, so that ties past the k-th are seen.
    return next((size for size in CANDIDATES if size > top_k), None)


class Cuts:
    """The three parameters of R rows, on the device."""

    def __init__(self, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> None:
        """`top_k_R`: int64, 0 off; `top_p_R`: float64, 1 off; `log_min_p_R`: float32, -inf off."""
        self.top_k_R = top_k_R
        self.top_p_R = top_p_R
        self.log_min_p_R = log_min_p_R

    def select(self, index: Tensor | slice) -> Cuts:
        """The same for some of the rows."""
        return Cuts(self.top_k_R[index], self.top_p_R[index], self.log_min_p_R[index])


def cut_candidates(scores_RV: Tensor, values_RC: Tensor, cuts: Cuts, *, by_top_k: bool) -> tuple[Tensor, Tensor]:
    """Threshold of each row from its highest scores.

    Args:
        scores_RV: float32, shifted so that each row's maximum is 0.
        values_RC: the C highest of each row, falling.
        cuts: the rows' parameters.
        by_top_k: all rows have a top-k under C (or C is V); otherwise none has, and all have a top-p.

    Returns:
        threshold_R: scores from here up are kept.
        complete_R: bool, False where the list is too short to hold all kept scores: use `cut_vocabulary`.
    """
    if values_RC.shape[1] == scores_RV.shape[1]:
        threshold_R = _cut_falling(values_RC, cuts)[1]
        return threshold_R, torch.ones_like(threshold_R, dtype=torch.bool)
    mass_R = None if by_top_k else _mass(scores_RV, cuts.log_min_p_R)
    before_top_p_R, threshold_R = _cut_falling(values_RC, cuts, mass_R)
    return threshold_R, values_RC[:, -1] < (before_top_p_R if by_top_k else threshold_R)


def cut_vocabulary(scores_RV: Tensor, cuts: Cuts) -> Tensor:
    """Threshold of each row [R] by sorting all scores; `scores_RV` as in `cut_candidates`."""
    if scores_RV.is_cuda:
        falling_RV = scores_RV.sort(dim=1, descending=True).values
    else:  # numpy sorts floats with vector instructions, seven times as fast as torch
        falling_RV = torch.from_numpy(np.sort(scores_RV.numpy(), axis=1)).flip(1)
    return _cut_falling(falling_RV, cuts)[1]


def _cut_falling(values_RC: Tensor, cuts: Cuts, mass_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Thresholds [R] without and with top-p, from falling scores.

    `mass_R`: sum of exp(score) over all scores that min-p keeps, for rows without top-k whose list is not the whole.
    """
    num_columns = values_RC.shape[1]
    last_kept_R1 = cuts.top_k_R.clamp(1, num_columns).sub_(1).unsqueeze(1)
    top_k_bound_R = values_RC.gather(1, last_kept_R1).squeeze(1)
    bound_R = torch.where(cuts.top_k_R > 0, torch.maximum(top_k_bound_R, cuts.log_min_p_R), cuts.log_min_p_R)
    running_RC = values_RC.double().exp_().mul_(values_RC >= bound_R.unsqueeze(1)).cumsum(1)
    target_R = cuts.top_p_R * (running_RC[:, -1] if mass_R is None else mass_R)
    # The token that reaches the target is the last one kept.
    crossing_R = (running_RC < target_R.unsqueeze(1)).sum(1)
    top_p_bound_R = values_RC.gather(1, crossing_R.clamp(max=num_columns - 1).unsqueeze(1)).squeeze(1)
    cut_R = (cuts.top_p_R < 1.0) & (crossing_R < num_columns)
    return bound_R, torch.where(cut_R, torch.maximum(bound_R, top_p_bound_R), bound_R)


def _mass(scores_RV: Tensor, threshold_R: Tensor) -> Tensor:
    """Sum of exp(score) over the scores from the threshold up; float64 [R]."""
    kept_RV = torch.where(scores_RV >= threshold_R.unsqueeze(1), scores_RV, NEGATIVE_INFINITY)
    # The most likely token has weight 1. Softmax adds up each row by itself, so the batch cannot change the last bit.
    return kept_RV.softmax(1).amax(1).double().reciprocal_()
