"""Products of few rows by kernel and by twin, against separate operations in float32."""

from __future__ import annotations

import pytest
import torch
from pagefleet_kernels.activation import Kind
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.few_rows_matmul import MAX_ROWS, few_rows_matmul, takes_few_rows

BACKENDS: tuple[Backend, ...] = ("triton", "torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("follows", ["nothing", "bias", "residual", "bias, residual", "silu", "bias, gelu_tanh"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 12, 130), (1, 10, 4224), (3, 130, 96), (16, 34, 300)])
def test_products(rows: int, outputs: int, inputs: int, follows: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, inputs + 16, device=device).to(dtype)
    x, weight = wide[:, 8:-8], (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if "bias" in follows else None
    residual = torch.randn(rows, outputs, device=device).to(dtype) if "residual" in follows else None
    gate: Kind | None = "silu" if "silu" in follows else "gelu_tanh" if "gelu" in follows else None
    expected = x.float() @ weight.float().T
    if bias is not None:
        expected += bias.float()
    if residual is not None:
        expected += residual.float()
    if gate is not None:
        first, up = expected.chunk(2, 1)
        act = torch.nn.functional
        expected = (act.silu(first) if gate == "silu" else act.gelu(first, approximate="tanh")) * up
    for backend in BACKENDS:
        into = None if residual is None else residual.clone()
        out = few_rows_matmul(x, weight, bias, residual_TO=into, gate=gate, backend=backend)
        assert out.dtype == dtype
        assert into is None or out is into
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_what_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device).bfloat16(), torch.zeros(4, 8, device=device).bfloat16()
    with pytest.raises(UnsupportedShapeError, match="T at most 16"):
        few_rows_matmul(x[:1].expand(MAX_ROWS + 1, 8), weight)
    with pytest.raises(UnsupportedShapeError, match="both must be bfloat16 or float16"):
        few_rows_matmul(x, weight.half())
    with pytest.raises(UnsupportedShapeError, match="not both"):
        few_rows_matmul(x, weight, residual_TO=x[:, :4], gate="silu")
    assert not takes_few_rows(x.float(), weight.float())
    assert not takes_few_rows(x[:0], weight)
    assert takes_few_rows(x, weight) == (device.type == "cuda")
