"""Products by codes of 4 bits: kernel against twin, twin against what the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagefleet_kernels.coded_matmul import CodedWeights, coded_matmul
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.packed_matmul import pack_numbers

from tests.kernels.test_packed_matmul import TOLERANCE

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_weights(
    outputs: int, inputs: int, group: int, scales: torch.dtype, own_table: bool, device: torch.device
) -> tuple[CodedWeights, torch.Tensor]:
    """Weights, and the float32 numbers that they stand for."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    table = torch.rand(16, generator=generator) - 0.5
    values = table if own_table else torch.tensor([*E2M1, *(-value for value in E2M1)])
    factor = torch.rand(outputs, generator=generator) / 8
    shape = (outputs, inputs // group)
    if scales == torch.uint8:
        stored = torch.randint(120, 128, shape, generator=generator).to(scales)
        each = 2.0 ** (stored.float() - 127)
    else:
        stored = torch.rand(shape, generator=generator).to(scales)
        each = stored.float()
    meant = values[codes] * each.repeat_interleave(group, 1) * factor[:, None]
    packed = pack_numbers(codes.to(torch.uint8), 4).to(device)
    own = table.to(device) if own_table else None
    return CodedWeights(packed, own, stored.to(device), factor.to(device), group), meant.to(device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("group", "scales", "own_table", "inputs"),
    [(16, FP8, False, 96), (32, torch.uint8, False, 160), (64, torch.float32, True, 192), (16, FP8, True, 128)],
)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 40), (19, 32)])
def test_products(
    rows: int,
    outputs: int,
    group: int,
    scales: torch.dtype,
    own_table: bool,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    weights, meant = random_weights(outputs, inputs, group, scales, own_table, device)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs + 8, generator=generator).to(dtype).to(device)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype).to(device)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(weights.dequantize(), meant, rtol=1e-6, atol=1e-6)
    for some_bias in (None, bias):
        exact = x.float() @ meant.t() + (0.0 if some_bias is None else some_bias.float())
        for one in (weights, replace(weights, factor_O=torch.ones(outputs, device=device))):
            twin = coded_matmul(x, one, some_bias, backend="torch")
            out = coded_matmul(x, one, some_bias, backend="triton")
            torch.testing.assert_close(out, twin, rtol=rtol, atol=atol)
        torch.testing.assert_close(
            coded_matmul(x, weights, some_bias, backend="torch").float(), exact, rtol=rtol, atol=atol
        )


def test_rows_of_a_matrix_and_no_rows_of_inputs(device: torch.device) -> None:
    weights, meant = random_weights(64, 64, 16, FP8, False, device)
    x = torch.ones(2, 64, device=device)
    for backend in ("torch", "triton"):
        out = coded_matmul(x, weights.rows(16, 48), backend=backend)
        torch.testing.assert_close(out, x @ meant[16:48].t(), rtol=1e-5, atol=1e-5)
    assert coded_matmul(x[:0], weights, backend="triton").shape == (0, 64)


def test_what_is_refused(device: torch.device) -> None:
    weights, _ = random_weights(16, 64, 16, FP8, False, device)
    x = torch.zeros(2, 64, device=device)
    for wrong, bias, said in (
        (weights, torch.zeros(15), "16 outputs need as many biases"),
        (replace(weights, group=24), None, "groups of 24 of 64 inputs"),
        (replace(weights, group=32), None, "must be"),
        (replace(weights, factor_O=torch.zeros(3)), None, "16 outputs need as many factors"),
    ):
        with pytest.raises(UnsupportedShapeError, match=said):
            coded_matmul(x, wrong, bias)
    with pytest.raises(UnsupportedShapeError, match="do not fit 64 inputs"):
        coded_matmul(x[:, :32], weights)
