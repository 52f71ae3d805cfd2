"""Matrices in few bits: what the nearest numbers lose, and what GPTQ and AWQ save of the products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.compression.awq import Fold, find_scales, folded
from pagefleet_engine.compression.gptq import Gptq
from pagefleet_engine.compression.grid import Grid, round_blocks, round_to_nearest
from pagefleet_engine.compression.inputs import Gram, Sample
from pagefleet_engine.compression.recipe import Recipe
from pagefleet_engine.compression.settings import ActOrder, Scheme
from pagefleet_engine.compression.stored import pack, stored_tensors
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.layers.quantization.packing import unpack
from torch import Tensor

SCHEMES: tuple[Scheme, ...] = ("fp8", "int8", "w4a16", "w4a16-asym", "w8a16")


def grid(scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> Grid:
    return Recipe(scheme=scheme, algorithm="rtn").grid(dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_with_outliers() -> Tensor:
    """Few directions and a few large inputs, as layers have them."""
    mixed_TI = random(512, 24, seed=1) @ random(24, 64, seed=2) + 0.1 * random(512, 64, seed=3)
    mixed_TI[:, [3, 40]] *= 20.0
    return mixed_TI


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(0, 2**16), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_weight_becomes_a_number_next_to_it_times_a_scale_that_is_stored(
    scheme: Scheme, seed: int, dtype: torch.dtype
) -> None:
    weight_OI = random(5, 32, seed=seed)
    weight_OI[0] = 0.0
    numbers = grid(scheme, dtype)
    rounded = round_to_nearest(weight_OI, numbers, 16)
    low, high = numbers.limits
    assert bool(((rounded.numbers_OI >= low) & (rounded.numbers_OI <= high)).all())
    assert torch.equal(rounded.scales, rounded.scales.to(dtype).float())
    step_OI = rounded.scales.repeat_interleave(16, 1)
    if scheme == "fp8":
        step_OI = step_OI * (weight_OI / step_OI).abs().clamp(min=16.0) / 8.0
    # The outermost of symmetric numbers may be half a step beyond the last; bfloat16 scales take a little more.
    assert bool(((rounded.weight() - weight_OI).abs() <= step_OI * 0.56 + 1e-6).all())


def test_a_block_has_one_scale_and_the_last_may_be_smaller() -> None:
    weight_OI = random(20, 40)
    rounded = round_blocks(weight_OI, grid("fp8", torch.float32), 16)
    assert rounded.scales.shape == (2, 3)
    assert rounded.scales[1, 2] == weight_OI[16:, 32:].abs().max() / 448.0
    torch.testing.assert_close(rounded.weight(), weight_OI, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_what_the_engine_reads_from_them(bits: int) -> None:
    numbers_RN = torch.randint(0, 1 << bits, (3, 21), dtype=torch.uint8)
    assert torch.equal(unpack(pack(numbers_RN, bits), bits)[:, :21], numbers_RN)


@pytest.mark.parametrize(("outputs", "size"), [(9, 16), (16, 32)], ids=["a last word", "one group"])
def test_zero_points_lie_along_outputs(outputs: int, size: int) -> None:
    recipe = Recipe(scheme="w4a16-asym", algorithm="rtn", group_size=size)
    rounded = round_to_nearest(random(outputs, 32) + 0.5, recipe.grid(torch.float32), size)
    tensors = stored_tensors("x", rounded, recipe, torch.float32)
    assert tensors["x.weight_zero_point"].shape == (2, 32 // size)
    zeros_OG = unpack(tensors["x.weight_zero_point"].t(), 4).t()[:outputs]
    assert torch.equal(zeros_OG.float() - 8, rounded.zeros_OG)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a16-asym", "int8"])
@pytest.mark.parametrize("order", ["none", "weight"])
@pytest.mark.parametrize("size", [16, None])
def test_gptq_loses_less_of_the_products_than_rounding(scheme: Scheme, order: ActOrder, size: int | None) -> None:
    gram, weight_OI = Gram(), random(48, 64)
    gram.see(inputs_with_outliers())
    how = Gptq(grid=grid(scheme), group_size=size, actorder=order, dampening_frac=0.01)
    found = how.round(weight_OI, gram.gram_II)
    nearest = round_to_nearest(weight_OI, how.grid, size)
    assert found.scales.shape == nearest.scales.shape
    lost = gram.square_of(found.weight() - weight_OI)
    assert lost < 0.5 * gram.square_of(nearest.weight() - weight_OI)


def test_gptq_takes_inputs_that_were_always_zero_and_few_tokens() -> None:
    gram = Gram()
    few_TI = random(3, 64)
    few_TI[:, 5] = 0.0
    gram.see(few_TI)
    how = Gptq(grid=grid("w4a16"), group_size=16, actorder="weight", dampening_frac=0.01)
    assert bool(how.round(random(8, 64), gram.gram_II).weight().isfinite().all())


def test_gptq_refuses_inputs_that_are_no_numbers() -> None:
    how = Gptq(grid=grid("w4a16"), group_size=16, actorder="none", dampening_frac=0.01)
    with pytest.raises(ConfigError, match="no usable Hessian"):
        how.round(random(8, 64), torch.full((64, 64), torch.nan))


def test_awq_finds_scales_that_save_large_inputs_and_change_nothing_else() -> None:
    sample, x_TI = Sample(every=4), inputs_with_outliers()
    sample.see(x_TI)
    tensors = {"norm.weight": random(64, seed=9), "a.weight": random(32, 64), "b.weight": random(16, 64, seed=4)}
    fold, numbers = Fold("norm", ("a", "b")), grid("w4a16")
    scales_I = find_scales(fold, tensors, sample, numbers, 16)
    now = folded(fold, scales_I, tensors, unit_offset=False)
    torch.testing.assert_close(now["a.weight"] * now["norm.weight"], tensors["a.weight"] * tensors["norm.weight"])
    before_OI = tensors["a.weight"]
    plain = round_to_nearest(before_OI, numbers, 16).weight() - before_OI
    scaled = round_to_nearest(before_OI * scales_I, numbers, 16).weight() / scales_I - before_OI
    assert sample.square_of(scaled) < sample.square_of(plain)


def test_norms_that_store_their_weights_less_one_are_scaled_with_it() -> None:
    tensors = {"norm.weight": random(8), "a.weight": random(4, 8)}
    scales_I = torch.linspace(0.5, 2.0, 8)
    now = folded(Fold("norm", ("a",)), scales_I, tensors, unit_offset=True)
    torch.testing.assert_close((now["norm.weight"] + 1.0) * scales_I, tensors["norm.weight"] + 1.0)
