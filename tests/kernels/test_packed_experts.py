"""Experts' products by numbers of few bits: kernel against twin, twin against one expert after another."""

from __future__ import annotations

import pytest
import torch
from pagefleet_kernels.activation import Kind
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.expert_blocks import align_experts
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.packed_experts import grouped_packed_matmul, order_inputs
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize

EXPERTS, TOP_K = 3, 2


def weights_of(outputs: int, inputs: int, bits: int, group: int | None, zeros: bool | float) -> PackedWeights:
    generator = torch.Generator().manual_seed(bits)
    rows, groups = EXPERTS * outputs, inputs // (group or inputs)
    numbers = torch.randint(0, 1 << bits, (rows, inputs), generator=generator).to(torch.uint8)
    zero = torch.randint(0, 1 << bits, (rows, groups), generator=generator).to(torch.uint8)
    if isinstance(zeros, float):
        zero = zero + zeros
    scales = torch.rand(rows, groups, generator=generator) / (1 << bits)
    return PackedWeights(pack_numbers(numbers, bits), scales, zero if zeros else None, bits, group)


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 32, True), (4, None, False), (8, 64, False), (8, None, True), (4, 64, 0.3)]
)
def test_each_pair_meets_its_expert(bits: int, group: int | None, zeros: bool | float, gate: Kind | None) -> None:
    outputs, inputs = 48, 128
    weights = weights_of(outputs, inputs, bits, group, zeros)
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 2], [2, 0], [-1, 2], [0, -1], [2, 0]], dtype=torch.int32)
    blocks = align_experts(chosen, EXPERTS, backend="torch")
    twin, out = (
        grouped_packed_matmul(x, weights, EXPERTS, blocks, x.dtype, top_k=TOP_K, gate=gate, backend=backend)
        for backend in ("torch", "triton")
    )
    dense = weights.dequantize().view(EXPERTS, outputs, inputs)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if expert < 0:
            continue
        expected = dense[expert] @ x[pair // TOP_K]
        if gate is not None:
            first, second = expected.chunk(2)
            expected = torch.nn.functional.silu(first) * second
        torch.testing.assert_close(twin[pair], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out[pair], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("number", [torch.int8, FP8], ids=str)
def test_rounded_inputs_meet_the_same_numbers(number: torch.dtype, gate: Kind | None) -> None:
    weights = weights_of(48, 128, 4, 32, True)
    x = quantize(torch.randn(4, 128, generator=torch.Generator().manual_seed(2)), QuantizeSpec(number), backend="torch")
    chosen = torch.tensor([[0, 2], [2, 1], [-1, 2], [0, -1]], dtype=torch.int32)
    blocks = align_experts(chosen, EXPERTS, backend="torch")
    meant = x.values.float() * x.scale
    expected = grouped_packed_matmul(
        meant, weights, EXPERTS, blocks, torch.float32, top_k=TOP_K, gate=gate, backend="torch"
    )
    there = chosen.flatten() >= 0
    for backend in ("torch", "triton"):
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
            out = grouped_packed_matmul(x, weights, EXPERTS, blocks, dtype, top_k=TOP_K, gate=gate, backend=backend)
            assert out.dtype == dtype
            torch.testing.assert_close(out[there].float(), expected[there], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("top_k", "inputs"), [(1, 48), (2, 2500)])
def test_rows_are_put_in_the_order_of_their_experts(top_k: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    orders = torch.stack([torch.randperm(inputs, generator=generator) for _ in range(EXPERTS)]).to(torch.int32)
    x = torch.randn(4, 3 * inputs, generator=generator)[:, inputs : 2 * inputs]
    chosen = torch.tensor([[0, 2], [2, 0], [-1, 1], [1, -1]], dtype=torch.int32)[:, :top_k].contiguous()
    for backend in ("torch", "triton"):
        out = order_inputs(x, orders, chosen, backend=backend)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            if expert >= 0:
                assert torch.equal(out[pair], x[pair // top_k, orders[expert].long()])


def test_misfits_are_refused() -> None:
    weights = weights_of(16, 32, 4, 32, True)
    blocks = align_experts(torch.zeros((2, TOP_K), dtype=torch.int32), EXPERTS, backend="torch")
    with pytest.raises(UnsupportedShapeError, match="pairs"):
        grouped_packed_matmul(torch.zeros(3, 32), weights, EXPERTS, blocks, torch.float32, top_k=TOP_K)
    with pytest.raises(UnsupportedShapeError, match="for each of 5"):
        grouped_packed_matmul(torch.zeros(2, 32), weights, 5, blocks, torch.float32, top_k=TOP_K)
    with pytest.raises(UnsupportedShapeError, match="do not fit"):
        grouped_packed_matmul(torch.zeros(2, 32), weights, EXPERTS, blocks, torch.bfloat16, top_k=TOP_K)
    rounded = Quantized(torch.zeros((2, 32), dtype=torch.int8), torch.ones(1))
    with pytest.raises(UnsupportedShapeError, match="a scale each"):
        grouped_packed_matmul(rounded, weights, EXPERTS, blocks, torch.float32, top_k=TOP_K)
    with pytest.raises(UnsupportedShapeError, match="orders"):
        order_inputs(
            torch.zeros(2, 32), torch.zeros((3, 16), dtype=torch.int32), torch.zeros((2, 1), dtype=torch.int32)
        )
