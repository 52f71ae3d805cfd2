"""Norms against their twins, and these against transformers' code and torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pagefleet_kernels import norm, reference
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.quantize import QuantizeSpec
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 600), (5, 3, 80), (2, 4, 128), (0, 64)])
def test_triton_matches_the_twin(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype).to(device)
    weight = torch.randn(shape[-1]).to(dtype).to(device)
    out = norm.rms_norm(x, weight, 1e-5, backend="triton")
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert_close(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("shape", [(4, 96), (2, 3, 64)])
def test_residual_norm_matches_the_twin_and_updates_the_residual(
    shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    torch.manual_seed(1)
    x, residual = torch.randn(2, *shape).to(dtype).to(device)
    weight = torch.randn(shape[-1]).to(dtype).to(device)
    before, expected_total = x.clone(), x + residual
    twins_residual = residual.clone()
    out = norm.rms_norm(x, weight, 1e-6, residual_TD=residual, unit_offset=unit_offset, backend="triton")
    twin = norm.rms_norm(x, weight, 1e-6, residual_TD=twins_residual, unit_offset=unit_offset, backend="torch")
    assert torch.equal(twins_residual, expected_total)
    assert_close(residual, expected_total)
    assert_close(out, twin)
    assert_close(twin, reference.rms_norm(expected_total, weight, 1e-6, unit_offset))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_gemma_are_offsets_from_one(dtype: torch.dtype, device: torch.device, assert_close: Close) -> None:
    torch.manual_seed(4)
    module = Gemma2RMSNorm(96, eps=1e-6).to(dtype)
    module.weight.data = torch.randn(96).to(dtype)
    x = (torch.randn(11, 96) * 10).to(dtype)
    expected = module(x).detach()
    weight = module.weight.data
    assert torch.equal(norm.rms_norm(x, weight, 1e-6, unit_offset=True), expected)
    out = norm.rms_norm(x.to(device), weight.to(device), 1e-6, unit_offset=True, backend="triton")
    assert_close(out, expected.to(device))


def test_heads_of_a_fused_projection_are_read_by_stride(device: torch.device, assert_close: Close) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(5, 8 * 32).to(device)
    q_TNH = qkv[:, 32 : 5 * 32].view(5, 4, 32)
    weight = torch.rand(32).to(device)
    residual = qkv[:, 5 * 32 :].view(5, 3, 32)[:, :2]
    assert_close(norm.rms_norm(q_TNH, weight, 1e-6, backend="triton"), reference.rms_norm(q_TNH, weight, 1e-6))
    expected_total = q_TNH[:, 1:3] + residual
    rest = qkv[:, 7 * 32 :].clone()
    out = norm.rms_norm(q_TNH[:, 1:3], weight, 1e-6, residual_TD=residual, backend="triton")
    assert_close(out, reference.rms_norm(expected_total, weight, 1e-6))
    assert_close(residual, expected_total)
    assert torch.equal(qkv[:, 7 * 32 :], rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_is_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    module.weight.data = torch.randn(96).to(dtype)
    x = (torch.randn(11, 96) * 10).to(dtype)
    assert torch.equal(norm.rms_norm(x, module.weight.data, 1e-5), module(x))


def test_zero_rows_stay_finite(device: torch.device) -> None:
    x = torch.zeros(3, 64, device=device)
    out = norm.rms_norm(x, torch.ones(64, device=device), 1e-6, backend="triton")
    assert torch.equal(out, x)


def test_misfits_are_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="as long as the weight"):
        norm.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        norm.rms_norm(torch.ones(8, 2).T, torch.ones(8), 1e-6)
    with pytest.raises(UnsupportedShapeError, match="alike"):
        norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6, residual_TD=torch.ones(3, 8))
    with pytest.raises(UnsupportedShapeError, match="at once"):
        norm.rms_norm(torch.ones(2, 3, 8), torch.ones(8), 1e-6, quantize=QuantizeSpec())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (5, 3, 80), (2, 1, 600)])
def test_layer_norm_matches_the_twin(
    shape: tuple[int, ...],
    of_heads: bool,
    has_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Close,
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 2).to(dtype).to(device)
    weight, bias = torch.randn(2, *(shape[1:] if of_heads else shape[-1:])).to(dtype).to(device)
    out = norm.layer_norm(x, weight, bias if has_bias else None, 1e-5, backend="triton")
    assert_close(out, reference.layer_norm(x, weight, bias if has_bias else None, 1e-5))


def test_layer_norm_is_torchs() -> None:
    x, weight, bias = torch.randn(3, 64) + 2, torch.randn(64), torch.randn(64)
    torch.testing.assert_close(norm.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (64,), weight, bias, 1e-5))


def test_layer_norm_after_a_residual_and_rounded(device: torch.device) -> None:
    torch.manual_seed(2)
    x, residual = torch.randn(2, 3, 96, device=device)
    weight, bias = torch.randn(2, 96, device=device)
    totals = residual.clone(), residual.clone()
    spec = QuantizeSpec(torch.int8)
    out = norm.layer_norm(x, weight, bias, 1e-5, residual_TD=totals[0], quantize=spec, backend="triton")
    twin = norm.layer_norm(x, weight, bias, 1e-5, residual_TD=totals[1], quantize=spec, backend="torch")
    torch.testing.assert_close(totals[0], totals[1])
    torch.testing.assert_close(out.scale, twin.scale)
    assert (out.values.int() - twin.values.int()).abs().max() <= 1


def test_layer_norm_refuses_what_does_not_fit() -> None:
    with pytest.raises(UnsupportedShapeError, match="a bias of"):
        norm.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(4), 1e-5)
    with pytest.raises(UnsupportedShapeError, match="does not fit a weight"):
        norm.layer_norm(torch.ones(2, 3, 8), torch.ones(2, 8), None, 1e-5)
