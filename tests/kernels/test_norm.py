"""RMSNorm against its twin, and the twin against transformers' Llama code, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from pagefleet_kernels import norm, reference
from pagefleet_kernels.errors import UnsupportedShapeError
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
@pytest.mark.parametrize("shape", [(4, 96), (2, 3, 64)])
def test_fused_add_matches_the_twin_and_leaves_its_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    torch.manual_seed(1)
    x, residual = torch.randn(2, *shape).to(dtype).to(device)
    weight = torch.randn(shape[-1]).to(dtype).to(device)
    before = x.clone(), residual.clone()
    out, total = norm.fused_add_rms_norm(x, residual, weight, 1e-6, backend="triton")
    expected_out, expected_total = reference.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert_close(total, expected_total)
    assert_close(out, expected_out)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_heads_of_a_fused_projection_are_read_by_stride(device: torch.device, assert_close: Close) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(5, 8 * 32).to(device)
    q_TNH = qkv[:, 32 : 5 * 32].view(5, 4, 32)
    weight = torch.rand(32).to(device)
    residual = qkv[:, 5 * 32 :].view(5, 3, 32)[:, :2]
    assert_close(norm.rms_norm(q_TNH, weight, 1e-6, backend="triton"), reference.rms_norm(q_TNH, weight, 1e-6))
    fused = norm.fused_add_rms_norm(q_TNH[:, 1:3], residual, weight, 1e-6, backend="triton")
    expected = reference.fused_add_rms_norm(q_TNH[:, 1:3], residual, weight, 1e-6)
    assert_close(fused[0], expected[0])
    assert_close(fused[1], expected[1])


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
        norm.fused_add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-6)
