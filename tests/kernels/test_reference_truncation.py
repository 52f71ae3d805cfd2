"""Thresholds of top-k, top-p and min-p against sorting and adding up in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pagefleet_kernels.reference_truncation import Cuts, cut_candidates, cut_vocabulary, num_candidates
from torch import Tensor

from tests.example_counts import examples


def kept_tokens(scores: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: the rule as written, one row, ties kept."""
    wide = scores.astype(np.float64)
    kept = np.ones(len(wide), dtype=bool)
    if min_p > 0:
        kept &= np.exp(wide - wide.max()) >= min_p * (1 - 1e-6)
    if top_k > 0:
        kept &= wide >= np.sort(wide)[-min(top_k, len(wide))]
    if top_p < 1:
        weights = np.where(kept, np.exp(wide - wide.max()), 0.0)
        order = np.argsort(-wide, kind="stable")
        running = np.cumsum(weights[order])
        last = int(np.searchsorted(running, top_p * running[-1]))
        kept &= wide >= wide[order[min(last, len(wide) - 1)]]
    return set(np.flatnonzero(kept).tolist())


def make_cuts(parameters: Sequence[tuple[int, float, float]]) -> Cuts:
    return Cuts(
        torch.tensor([top_k for top_k, _, _ in parameters]),
        torch.tensor([top_p for _, top_p, _ in parameters], dtype=torch.float64),
        torch.tensor([math.log(min_p) if min_p > 0 else -math.inf for _, _, min_p in parameters]),
    )


def shifted(scores_RV: Tensor) -> Tensor:
    return scores_RV - scores_RV.amax(1, keepdim=True)


def tokens_from(scores_V: Tensor, threshold: Tensor) -> set[int]:
    return set((scores_V >= threshold).nonzero().squeeze(1).tolist())


PARAMETERS = st.tuples(
    st.sampled_from([0, 2, 3, 10, 63, 64, 400]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    st.sampled_from([0.0, 1e-4, 0.1, 0.9, 1.0]),
)


@settings(max_examples=examples(80), deadline=None)
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_looking_at_the_whole_vocabulary_keeps_what_sorting_keeps(
    parameters: list[tuple[int, float, float]], scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_RV = shifted(torch.randn(len(parameters), 500, generator=generator) * scale)
    threshold_R = cut_vocabulary(scores_RV, make_cuts(parameters))
    for scores_V, threshold, parameter in zip(scores_RV, threshold_R, parameters, strict=True):
        expected = kept_tokens(scores_V.numpy(), *parameter)
        got = tokens_from(scores_V, threshold)
        assert got == expected


@pytest.mark.parametrize(("top_k", "size"), [(2, 64), (40, 64), (63, 64), (200, 256)])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_candidates_of_top_k_hold_what_sorting_keeps(top_k: int, size: int, top_p: float, min_p: float) -> None:
    scores_RV = shifted(torch.randn(6, 1_000, generator=torch.Generator().manual_seed(3)) * 2)
    cuts = make_cuts([(top_k, top_p, min_p)] * 6)
    threshold_R, complete_R = cut_candidates(scores_RV, scores_RV.topk(size).values, cuts, by_top_k=True)
    assert complete_R.all()
    for scores_V, threshold in zip(scores_RV, threshold_R, strict=True):
        assert tokens_from(scores_V, threshold) == kept_tokens(scores_V.numpy(), top_k, top_p, min_p)


def test_candidates_of_top_p_are_complete_only_where_they_reach_it() -> None:
    generator = torch.Generator().manual_seed(5)
    scores_RV = shifted(torch.cat([torch.randn(2, 4_000, generator=generator) * s for s in (5.0, 0.1)]))
    cuts = make_cuts([(0, 0.9, 0.0)] * 4)
    threshold_R, complete_R = cut_candidates(scores_RV, scores_RV.topk(256).values, cuts, by_top_k=False)
    assert complete_R.tolist() == [True, True, False, False]
    for row in (0, 1):
        assert tokens_from(scores_RV[row], threshold_R[row]) == kept_tokens(scores_RV[row].numpy(), 0, 0.9, 0.0)


def test_ties_past_the_end_of_the_candidates_are_noticed() -> None:
    scores_RV = torch.zeros(1, 300)
    scores_RV[0, 100:] = -1.0
    by_k = cut_candidates(scores_RV, scores_RV.topk(64).values, make_cuts([(50, 1.0, 0.0)]), by_top_k=True)
    by_p = cut_candidates(scores_RV, scores_RV.topk(64).values, make_cuts([(0, 0.2, 0.0)]), by_top_k=False)
    assert not by_k[1].any()
    assert not by_p[1].any()
    assert cut_vocabulary(scores_RV, make_cuts([(50, 1.0, 0.0)])).tolist() == [0.0]


def test_a_list_as_long_as_the_vocabulary_is_always_complete() -> None:
    scores_RV = shifted(torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * 0.01)
    for by_top_k, top_k in ((False, 0), (True, 64)):
        cuts = make_cuts([(top_k, 0.97, 0.0)] * 3)
        threshold_R, complete_R = cut_candidates(scores_RV, scores_RV.topk(64).values, cuts, by_top_k=by_top_k)
        assert complete_R.all()
        for scores_V, threshold in zip(scores_RV, threshold_R, strict=True):
            assert tokens_from(scores_V, threshold) == kept_tokens(scores_V.numpy(), top_k, 0.97, 0.0)


def test_the_most_likely_token_is_always_kept() -> None:
    scores_RV = shifted(torch.tensor([[-3.0, 5.0, 1.0, -math.inf]]))
    for parameter in ((2, 1e-12, 1.0), (0, 1e-12, 0.0), (0, 1.0, 1.0)):
        assert 1 in tokens_from(scores_RV[0], cut_vocabulary(scores_RV, make_cuts([parameter]))[0])


@pytest.mark.parametrize(
    ("top_k", "top_p", "size"),
    [(0, 1.0, None), (0, 0.9, 256), (5, 1.0, 64), (63, 0.5, 64), (64, 1.0, 256), (1023, 1.0, 1024), (1024, 1.0, None)],
)
def test_length_of_the_list_follows_from_the_rows_own_parameters(top_k: int, top_p: float, size: int | None) -> None:
    assert num_candidates(top_k, top_p) == size
