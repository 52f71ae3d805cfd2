"""Experts' products by codes of 4 bits: kernel against twin, twin against one expert after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagefleet_kernels.activation import Kind
from pagefleet_kernels.coded_experts import grouped_coded_matmul
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.expert_blocks import align_experts
from pagefleet_kernels.fp8 import FP8

from tests.kernels.test_coded_matmul import random_weights
from tests.kernels.test_packed_matmul import TOLERANCE

EXPERTS, TOP_K, OUTPUTS, INPUTS = 3, 2, 48, 192
CHOSEN = torch.tensor([[0, 2], [2, 0], [-1, 2], [0, -1], [2, 0]], dtype=torch.int32)
KINDS = [(16, FP8, False), (32, torch.uint8, False), (64, torch.float32, True)]
"""NVFP4, MXFP4 and nf4."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize(("group", "scales", "own_table"), KINDS)
def test_each_pair_meets_its_expert(
    group: int, scales: torch.dtype, own_table: bool, gate: Kind | None, dtype: torch.dtype, device: torch.device
) -> None:
    weights, meant = random_weights(EXPERTS * OUTPUTS, INPUTS, group, scales, own_table, device)
    if scales == torch.uint8:
        weights = replace(weights, factor_O=None)
        meant = weights.dequantize()
    x = torch.randn(len(CHOSEN), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    blocks = align_experts(CHOSEN.to(device), EXPERTS, backend="torch")
    twin, out = (
        grouped_coded_matmul(x, weights, EXPERTS, blocks, top_k=TOP_K, gate=gate, backend=backend)
        for backend in ("torch", "triton")
    )
    assert twin.shape == out.shape == (CHOSEN.numel(), OUTPUTS if gate is None else OUTPUTS // 2)
    rtol, atol = TOLERANCE[dtype]
    for pair, expert in enumerate(CHOSEN.flatten().tolist()):
        if expert < 0:
            continue
        expected = meant.view(EXPERTS, OUTPUTS, INPUTS)[expert] @ x[pair // TOP_K].float()
        if gate is not None:
            first, second = expected.chunk(2)
            expected = torch.nn.functional.silu(first) * second
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(twin[pair].float(), expected, rtol=rtol, atol=atol * largest)
        torch.testing.assert_close(out[pair].float(), expected, rtol=rtol, atol=atol * largest)


def test_misfits_are_refused() -> None:
    weights, _ = random_weights(EXPERTS * OUTPUTS, 64, 32, torch.uint8, False, torch.device("cpu"))
    blocks = align_experts(torch.zeros((2, TOP_K), dtype=torch.int32), EXPERTS, backend="torch")
    with pytest.raises(UnsupportedShapeError, match="6 pairs"):
        grouped_coded_matmul(torch.zeros(3, 64), weights, EXPERTS, blocks, top_k=TOP_K)
    with pytest.raises(UnsupportedShapeError, match="for each of 5"):
        grouped_coded_matmul(torch.zeros(2, 64), weights, 5, blocks, top_k=TOP_K)
    with pytest.raises(UnsupportedShapeError, match="do not fit"):
        grouped_coded_matmul(torch.zeros(2, 32), weights, EXPERTS, blocks, top_k=TOP_K)
