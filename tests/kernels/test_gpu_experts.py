"""The kernels of experts and of masks at the sizes of serving, which only a GPU gets through."""

from __future__ import annotations

import math

import pytest
import torch
from pagefleet_kernels.expert_blocks import align_experts
from pagefleet_kernels.experts import ExpertWeights, combine_experts, grouped_matmul
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.quantize import Activations, QuantizeSpec, quantize, quantize_with_zeros
from pagefleet_kernels.scaled_matmul import Shift
from pagefleet_kernels.token_mask import mask_tokens_, num_words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
BLOCK = 128
# Qwen3-30B-A3B: many small experts; Mixtral-8x7B: few large ones, here narrower.
SHAPES = {"many small": (2048, 768, 128, 8), "few large": (4096, 2048, 8, 2)}


def experts_in(form: str, weight: torch.Tensor) -> ExpertWeights:
    """Matrices [E, O, I] as a form stores them."""
    if form == "bfloat16":
        return ExpertWeights(weight)
    dtype = torch.int8 if form.startswith("int8") else FP8
    values, scales = quantize(weight.flatten(0, 1), QuantizeSpec(dtype))
    if form == "fp8 block":
        count, outputs, inputs = weight.shape
        scales = torch.rand(count, outputs // BLOCK, inputs // BLOCK, device=weight.device) / 1000
        return ExpertWeights(values.view(weight.shape), scales, BLOCK)
    return ExpertWeights(values.view(weight.shape), scales.view(weight.shape[:2]))


def inputs_in(form: str, x: torch.Tensor, weights: ExpertWeights) -> tuple[Activations, Shift | None]:
    """What a product is given of inputs."""
    if form == "bfloat16":
        return x, None
    if form == "int8 zeros":
        rounded, zeros = quantize_with_zeros(x)
        return rounded, Shift(zeros, weights.values_EOI.sum(-1, dtype=torch.int32))
    return quantize(
        x, QuantizeSpec(torch.int8 if form == "int8" else FP8, group=BLOCK if "block" in form else None)
    ), None


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "fp8 block", "int8", "int8 zeros"])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_of_experts_is_its_twin(shape: str, tokens: int, form: str, device: torch.device) -> None:
    hidden, width, num_experts, top_k = SHAPES[shape]
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden, device=device).to(BF16)
    weights, experts = torch.rand(tokens, num_experts, device=device).topk(top_k, -1)
    experts = experts.to(torch.int32)
    experts[-1, 0] = -1  # another rank's
    first = experts_in(form, (torch.randn(num_experts, 2 * width, hidden, device=device) / hidden**0.5).to(BF16))
    second = experts_in(form, (torch.randn(num_experts, hidden, width, device=device) / width**0.5).to(BF16))
    given, shift = inputs_in(form, x, first)
    blocks, twins = align_experts(experts, num_experts), align_experts(experts, num_experts, backend="torch")
    used = blocks.experts_B >= 0
    assert torch.equal(blocks.experts_B, twins.experts_B)
    assert torch.equal(
        blocks.pairs_BM[used].clamp(max=blocks.num_pairs), twins.pairs_BM[used].clamp(max=blocks.num_pairs)
    )

    there = experts.flatten() >= 0
    inner = grouped_matmul(given, first, blocks, BF16, top_k=top_k, gate="silu", shift=shift)
    expected = grouped_matmul(given, first, twins, BF16, top_k=top_k, gate="silu", shift=shift, backend="torch")
    assert_near(inner[there], expected[there])
    expected[~there] = 0
    rounded, shift = inputs_in(form, expected, second)
    outer = grouped_matmul(rounded, second, blocks, BF16, shift=shift)
    expected = grouped_matmul(rounded, second, twins, BF16, shift=shift, backend="torch")
    assert_near(outer[there], expected[there])
    expected[~there] = math.nan
    out, wanted = (combine_experts(expected, weights, experts, backend=backend) for backend in (None, "torch"))
    assert_near(out, wanted)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of float sums."""
    actual, expected = actual.float(), expected.float()
    assert not actual.isnan().any()
    assert (actual - expected).norm() <= 6e-3 * expected.norm()
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=3e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_masks_of_a_large_vocabulary(dtype: torch.dtype, device: torch.device) -> None:
    vocab_size = 151_937
    logits = torch.randn(64, vocab_size, device=device).to(dtype)
    allowed = torch.randint(-(2**31), 2**31, (64, num_words(vocab_size)), device=device).to(torch.int32)
    expected = logits.clone()
    mask_tokens_(expected, allowed, backend="torch")
    mask_tokens_(logits, allowed)
    assert torch.equal(logits, expected)
