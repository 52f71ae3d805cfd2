"""Products of eight bits: kernel against twin, twin against the product of what the numbers stand for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagefleet_kernels import scaled_matmul as module
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8
from pagefleet_kernels.quantize import QuantizeSpec, quantize, quantize_with_zeros
from pagefleet_kernels.scaled_matmul import Shift, scaled_matmul

BACKENDS: tuple[Backend, ...] = ("triton", "torch")
SHAPES = [(1, 16, 32), (17, 48, 96), (5, 40, 72)]  # tokens, outputs, inputs: tiles that fit and tiles that do not
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 2e-2), torch.bfloat16: (1.6e-2, 6e-2)}


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("scales", ["tensor", "token and channel", "tensor and channel", "token and tensor"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(FP8, torch.bfloat16), (FP8, torch.float32), (torch.int8, torch.float32)]
)
def test_products_with_scales(
    dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int, int], scales: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    tokens, outputs, inputs = shape
    x, x_scale = quantize(torch.randn(tokens, inputs, device=device), QuantizeSpec(dtype))
    weight, weight_scale = quantize(torch.randn(outputs, inputs, device=device), QuantizeSpec(dtype))
    if scales.startswith("tensor"):
        x_scale = x_scale[0, 0]
    if scales.endswith("tensor"):
        weight_scale = weight_scale[:1, 0]
    bias = torch.randn(outputs, device=device).to(out_dtype)
    expected = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
    for some_bias in (None, bias):
        exact = expected if some_bias is None else expected + some_bias.float()
        twin = scaled_matmul(x, x_scale, weight, weight_scale, some_bias, out_dtype, backend="torch")
        out = scaled_matmul(x, x_scale, weight, weight_scale, some_bias, out_dtype, backend="triton")
        assert out.shape == (tokens, outputs)
        assert twin.dtype == out.dtype == out_dtype
        assert_near(twin, exact)
        assert_near(out, twin)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("shape", [(3, 40, 128), (17, 64, 160)])
@pytest.mark.parametrize("quantized_inputs", [True, False])
def test_products_with_scales_of_blocks(
    quantized_inputs: bool, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(1)
    (tokens, outputs, inputs), block = shape, 32
    columns = -(-inputs // block)
    weight = quantize(torch.randn(outputs, inputs, device=device), QuantizeSpec(dtype)).values
    weight_scale = torch.rand(-(-outputs // block), columns, device=device) / 64
    large = weight_scale.repeat_interleave(block, 0)[:outputs].repeat_interleave(block, 1)[:, :inputs]
    floats = torch.randn(tokens, inputs, device=device)
    if quantized_inputs:
        x, x_scale = quantize(floats, QuantizeSpec(dtype, group=block))
        expected = (x.float() * x_scale.repeat_interleave(block, 1)) @ (weight.float() * large).t()
        arguments: tuple[Any, ...] = (x, x_scale, weight, weight_scale, None, torch.float32, block)
    else:
        expected = floats @ (weight.float() * large).t()
        arguments = (floats, None, weight, weight_scale, None, torch.float32, block)
    assert_near(scaled_matmul(*arguments, backend="torch"), expected)
    assert_near(scaled_matmul(*arguments, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_alone_are_expanded(x_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 64, device=device).to(x_dtype)
    weight, scale = quantize(torch.randn(32, 64, device=device), QuantizeSpec(dtype))
    expected = x.float() @ (weight.float() * scale).t()
    assert_near(scaled_matmul(x, None, weight, scale, None, x_dtype, backend="torch"), expected)
    assert_near(scaled_matmul(x, None, weight, scale, None, x_dtype, backend="triton"), expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_sums_of_int8_are_exact(backend: Backend, device: torch.device) -> None:
    """A sum of 4,096 products of 127 passes 2^24, beyond which float32 has not every integer."""
    x = torch.full((2, 4096), 127, dtype=torch.int8, device=device)
    weight = torch.full((16, 4096), 127, dtype=torch.int8, device=device)
    weight[1, 0] = -127
    one = torch.ones(1, device=device)
    out = scaled_matmul(x, one, weight, one, None, torch.float32, backend=backend)
    assert out[0, 0].item() == float(torch.tensor(4096 * 127 * 127.0))
    assert out[0, 1].item() == float(torch.tensor(4094 * 127 * 127.0))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_no_tokens(backend: Backend, device: torch.device) -> None:
    one = torch.ones(1, device=device)
    x, weight = torch.zeros(0, 32, dtype=torch.int8), torch.zeros(16, 32, dtype=torch.int8)
    out = scaled_matmul(x.to(device), one, weight.to(device), one, None, torch.float16, backend=backend)
    assert out.shape == (0, 16)
    assert out.dtype == torch.float16


@pytest.mark.parametrize("scales", [(1, 1), (17, 1), (1, 32), (17, 32)])
def test_hopper_asks_the_library(scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which scales reach `torch._scaled_mm`, whose own product only a GPU has: one each, or one per row and column."""
    torch.manual_seed(4)
    x, weight = torch.randn(17, 64).to(FP8), torch.randn(32, 64).to(FP8)
    x_scale, weight_scale, bias = torch.rand(scales[0]), torch.rand(scales[1]), torch.randn(32)
    given = SimpleNamespace(shapes=None)

    def scaled_mm(
        a: Any, b: Any, *, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any, use_fast_accum: bool
    ) -> Any:
        assert b.stride(0) == 1, "the library wants its second matrix by columns"
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        given.shapes = (tuple(scale_a.shape), tuple(scale_b.shape))
        return ((a.float() @ b.float()) * scale_a * scale_b + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(module, "choose_backend", lambda device, backend: "triton")
    out = scaled_matmul(x, x_scale, weight, weight_scale, bias, torch.bfloat16)
    monkeypatch.undo()
    assert given.shapes == (((), ()) if scales == (1, 1) else ((17, 1), (1, 32)))
    expected = scaled_matmul(x, x_scale, weight, weight_scale, bias, torch.bfloat16, backend="torch")
    assert_near(out, expected)


def test_hopper_keeps_few_rows_with_scales_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "architecture", lambda device: "sm_90")
    weight, scale = torch.zeros(32, 64).to(FP8), torch.ones(32)
    takes = [module._library_takes(torch.zeros(rows, 64).to(FP8), weight, scale, torch.bfloat16) for rows in (16, 17)]
    assert takes == [False, True]
    refused = [
        (torch.zeros(17, 72).to(FP8), torch.zeros(32, 72).to(FP8), torch.bfloat16),
        (torch.zeros(17, 64).to(FP8), torch.zeros(40, 64).to(FP8), torch.bfloat16),
        (torch.zeros(17, 64).to(FP8), weight, torch.float16),
        (torch.zeros(17, 64, dtype=torch.int8), weight, torch.bfloat16),
    ]
    for x, other, out_dtype in refused:
        assert not module._library_takes(x, other, scale, out_dtype)


def test_misfits_are_refused() -> None:
    x, weight, one = torch.zeros(2, 32).to(FP8), torch.zeros(16, 32).to(FP8), torch.ones(1)
    bf16 = torch.bfloat16
    with pytest.raises(UnsupportedShapeError, match=r"\[T, I\]"):
        scaled_matmul(x, one, weight[:, :16], one, None, bf16)
    with pytest.raises(UnsupportedShapeError, match="last axis"):
        scaled_matmul(x[:, :16], one, weight[:, :16].t(), one, None, bf16)
    with pytest.raises(UnsupportedShapeError, match="int8 by int8"):
        scaled_matmul(x, one, weight.float().to(torch.int8), one, None, bf16)
    with pytest.raises(UnsupportedShapeError, match="without scales"):
        scaled_matmul(x, None, weight, one, None, bf16)
    with pytest.raises(UnsupportedShapeError, match="bfloat16, float16 or float32"):
        scaled_matmul(x, one, weight, one, None, torch.int32)
    with pytest.raises(UnsupportedShapeError, match="biases"):
        scaled_matmul(x, one, weight, one, torch.ones(15), bf16)
    with pytest.raises(UnsupportedShapeError, match="one for each"):
        scaled_matmul(x, torch.ones(3), weight, one, None, bf16)
    with pytest.raises(UnsupportedShapeError, match="powers of two"):
        scaled_matmul(x, one, weight, one, None, bf16, 24)
    with pytest.raises(UnsupportedShapeError, match="must be"):
        scaled_matmul(x, one, weight, one, None, bf16, 32)


@pytest.mark.parametrize("fixed", [True, False])
def test_products_of_numbers_around_zero_points(fixed: bool, device: torch.device) -> None:
    torch.manual_seed(3)
    x = torch.randn(19, 96, device=device) + 2.0
    given = (torch.tensor(0.04, device=device), torch.tensor(-77.0, device=device)) if fixed else None
    numbers, zeros = quantize_with_zeros(x, given, backend="torch")
    weight, weight_scale = quantize(torch.randn(40, 96, device=device), QuantizeSpec(torch.int8))
    shift, bias = Shift(zeros, weight.sum(1, dtype=torch.int32)), torch.randn(40, device=device)
    expected = ((numbers.values - zeros) * numbers.scale) @ (weight.float() * weight_scale).t() + bias
    for backend in BACKENDS:
        arguments = (numbers.values, numbers.scale, weight, weight_scale, bias, torch.float32)
        assert_near(scaled_matmul(*arguments, shift=shift, backend=backend), expected)
    with pytest.raises(UnsupportedShapeError, match="zero points beside"):
        scaled_matmul(x, None, weight, weight_scale, None, torch.float32, shift=shift)
    with pytest.raises(UnsupportedShapeError, match="zero points and 39 sums do not fit"):
        scaled_matmul(
            numbers.values, numbers.scale, weight, weight_scale, None, torch.float32, shift=Shift(zeros, shift[1][1:])
        )
