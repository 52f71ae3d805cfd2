"""Products by numbers of few bits: kernel against twin, twin against what the numbers stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.packed_matmul import (
    PackedWeights,
    pack_numbers,
    packed_matmul,
    packed_rounded_matmul,
    unpack_numbers,
)
from pagefleet_kernels.quantize import QuantizeSpec, quantize

TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 2e-2), torch.bfloat16: (1.6e-2, 6e-2)}


def random_weights(
    outputs: int, inputs: int, bits: int, group: int | None, zeros: bool | float, device: torch.device
) -> tuple[PackedWeights, torch.Tensor]:
    """Weights, and the float32 numbers that they stand for. A float is added to zero points, which are floats then."""
    generator = torch.Generator().manual_seed(bits)
    groups = inputs // (group or inputs)
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    scales = torch.rand(outputs, groups, generator=generator) / (1 << bits)
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=generator)
    if not zeros:
        zero = torch.full_like(zero, 1 << (bits - 1))
    if isinstance(zeros, float):
        zero = zero + zeros
    spread = [one.repeat_interleave(group or inputs, 1) for one in (zero, scales)]
    meant = (numbers - spread[0]).float() * spread[1]
    packed = pack_numbers(numbers.to(torch.uint8), bits).to(device)
    zeros_OG = zero.to(torch.float32 if isinstance(zeros, float) else torch.uint8).to(device) if zeros else None
    return PackedWeights(packed, scales.to(device), zeros_OG, bits, group), meant.to(device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("bits", "group", "zeros", "inputs"),
    [
        (4, 32, True, 96),
        (4, 64, False, 128),
        (4, None, True, 160),
        (8, 32, True, 96),
        (8, None, False, 96),
        (4, 32, 0.37, 96),
        (8, None, -0.4, 96),
    ],
)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 40), (19, 32)])
def test_products(
    rows: int,
    outputs: int,
    bits: int,
    group: int | None,
    zeros: bool | float,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weights, meant = random_weights(outputs, inputs, bits, group, zeros, device)
    generator = torch.Generator().manual_seed(rows)
    # a slice of something wider, as a projection's result may be
    x = torch.randn(rows, inputs + 8, generator=generator).to(dtype).to(device)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype).to(device)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(weights.dequantize(), meant, rtol=1e-6, atol=1e-6)
    for some_bias in (None, bias):
        exact = x.float() @ meant.t() + (0.0 if some_bias is None else some_bias.float())
        twin = packed_matmul(x, weights, some_bias, backend="torch")
        out = packed_matmul(x, weights, some_bias, backend="triton")
        assert twin.dtype == out.dtype == dtype
        torch.testing.assert_close(twin.float(), exact, rtol=rtol, atol=atol)
        torch.testing.assert_close(out.float(), twin.float(), rtol=rtol, atol=atol)


def test_rows_of_a_matrix(device: torch.device) -> None:
    weights, meant = random_weights(48, 64, 4, 32, True, device)
    x = torch.randn(3, 64, device=device)
    backend: Backend
    for backend in ("torch", "triton"):
        out = packed_matmul(x, weights.rows(16, 48), backend=backend)
        torch.testing.assert_close(out, x @ meant[16:].t(), rtol=1e-4, atol=1e-4)


def test_no_tokens(device: torch.device) -> None:
    weights, _ = random_weights(16, 32, 4, 32, True, device)
    assert packed_matmul(torch.zeros(0, 32, device=device), weights, backend="triton").shape == (0, 16)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_packed_and_unpacked(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (5, 96)).to(torch.uint8)
    packed = pack_numbers(numbers, bits)
    assert packed.shape == (5, 96 * bits // 8)
    assert torch.equal(unpack_numbers(packed, bits), numbers)


def test_misfits_are_refused() -> None:
    weights, _ = random_weights(16, 64, 4, 32, True, torch.device("cpu"))
    x = torch.zeros(2, 64)
    with pytest.raises(UnsupportedShapeError, match="64 inputs"):
        packed_matmul(x[:, :32], weights)
    with pytest.raises(UnsupportedShapeError, match="64 inputs"):
        packed_matmul(x.double(), weights)
    with pytest.raises(UnsupportedShapeError, match="5 bits"):
        packed_matmul(torch.zeros(2, 51), replace(weights, bits=5))
    with pytest.raises(UnsupportedShapeError, match="groups of 16"):
        packed_matmul(x, replace(weights, group=16))
    with pytest.raises(UnsupportedShapeError, match=r"must be \(16, 1\)"):
        packed_matmul(x, replace(weights, group=64))
    with pytest.raises(UnsupportedShapeError, match="biases"):
        packed_matmul(x, weights, torch.zeros(15))
    with pytest.raises(UnsupportedShapeError, match="whole runs of 32"):
        pack_numbers(torch.zeros(2, 48, dtype=torch.uint8), 4)


@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize(("bits", "group", "zeros"), [(4, 32, True), (4, None, False), (8, 64, True)])
def test_products_of_rounded_inputs(
    bits: int, group: int | None, zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    weights, meant = random_weights(40, 128, bits, group, zeros, device)
    x = quantize(torch.randn(19, 128, generator=torch.Generator().manual_seed(1)).to(device), QuantizeSpec(dtype))
    bias = torch.ones(40, device=device)
    expected = (x.values.float() * x.scale) @ meant.t() + bias
    for backend in ("torch", "triton"):
        for out_dtype in (torch.float32, torch.bfloat16):
            out = packed_rounded_matmul(*x, weights, bias, out_dtype, backend=backend)
            rtol, atol = TOLERANCE[out_dtype]
            assert out.dtype == out_dtype
            torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol)
    with pytest.raises(UnsupportedShapeError, match="do not fit 128 inputs"):
        packed_rounded_matmul(x.values.float(), x.scale, weights, None, torch.float32)
    with pytest.raises(UnsupportedShapeError, match=r"with scales \[19\] is not supported"):
        packed_rounded_matmul(x.values, x.scale[:, 0], weights, None, torch.float32)
