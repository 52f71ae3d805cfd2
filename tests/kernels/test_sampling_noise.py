"""The counter-based noise: its distribution, and that it hangs on (seed, position, token) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pagefleet_kernels.sampling_noise import (
    mix64,
    row_keys,
    spread_token_ids,
    subtract_log_exponential_,
)
from torch import Tensor

NUM_DRAWS = 100_000


def keys(seeds: object, positions: object) -> Tensor:
    seeds_R, positions_R = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return torch.from_numpy(row_keys(np.ascontiguousarray(seeds_R), np.ascontiguousarray(positions_R)))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts.double() - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """About the 1 - 1e-6 quantile of chi-square (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * math.pow(1 - spread + 4.75 * math.sqrt(spread), 3)


@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_distribution_and_do_not_hang_together(by: str) -> None:
    weights = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    counter = np.arange(NUM_DRAWS)
    keys_R2 = keys(7, counter) if by == "position" else keys(counter, 3)
    scores = weights.log().float().expand(NUM_DRAWS, -1).clone()
    draws = subtract_log_exponential_(scores, spread_token_ids(torch.arange(8)), keys_R2).argmax(1)
    assert chi_square(draws.bincount(minlength=8), NUM_DRAWS * weights) < bound(7)
    pairs = (draws[:-1] * 8 + draws[1:]).bincount(minlength=64)
    assert chi_square(pairs, (NUM_DRAWS - 1) * torch.outer(weights, weights).flatten()) < bound(63)


def test_a_flat_distribution_over_many_tokens_is_drawn_flat() -> None:
    num_tokens, first = 256, 120_000
    ids = spread_token_ids(torch.arange(first, first + num_tokens))
    draws = subtract_log_exponential_(torch.zeros(NUM_DRAWS, num_tokens), ids, keys(11, np.arange(NUM_DRAWS))).argmax(1)
    expected = torch.full((num_tokens,), NUM_DRAWS / num_tokens, dtype=torch.float64)
    assert chi_square(draws.bincount(minlength=num_tokens), expected) < bound(num_tokens - 1)


def test_noise_is_gumbel_over_a_whole_vocabulary() -> None:
    noise = subtract_log_exponential_(
        torch.zeros(4, 150_000), spread_token_ids(torch.arange(150_000)), keys(5, range(4))
    )
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        below = float((noise < -np.log(-np.log(quantile))).double().mean())
        assert below == pytest.approx(quantile, abs=4 * (quantile * (1 - quantile) / noise.numel()) ** 0.5)


def test_noise_of_a_token_is_the_same_in_any_row_and_column() -> None:
    ids = torch.tensor([3, 90, 17, 40_000])
    whole = subtract_log_exponential_(torch.zeros(3, 4), spread_token_ids(ids), keys([1, 2, 3], [9, 8, 7]))
    order = torch.tensor([2, 0])
    per_row = spread_token_ids(ids[torch.tensor([[1, 3, 0], [3, 2, 1]])])
    part = subtract_log_exponential_(torch.zeros(2, 3), per_row, keys([3, 1], [7, 9]))
    assert torch.equal(part[0], whole[order[0]][[1, 3, 0]])
    assert torch.equal(part[1], whole[order[1]][[3, 2, 1]])


def test_seeds_and_positions_both_matter() -> None:
    grid = keys(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    assert len({tuple(key) for key in grid.tolist()}) == 10_000
    assert not torch.equal(keys(0, 1), keys(1, 0))


def test_mix_is_one_to_one_and_flips_half_the_bits() -> None:
    values = np.arange(10_000, dtype=np.uint64)
    assert len(set(mix64(values).tolist())) == 10_000
    flipped = mix64(values) ^ mix64(values ^ np.uint64(1))
    bits = np.unpackbits(flipped.view(np.uint8)).mean()
    assert bits == pytest.approx(0.5, abs=0.01)
