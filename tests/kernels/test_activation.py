"""SiLU times up against its twin and against torch, at widths that fill a tile, part of one, and several."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pagefleet_kernels import activation, reference
from pagefleet_kernels.errors import UnsupportedShapeError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 100), (2, 1100), (0, 8)])
def test_triton_matches_the_twin(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(tokens, 2 * width) * 4).to(dtype).to(device)
    out = activation.silu_and_mul(gate_up, backend="triton")
    assert out.shape == (tokens, width)
    assert_close(out, reference.silu_and_mul(gate_up))


def test_gate_is_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, 2.0, 10.0, 100.0]])
    expected = F.silu(torch.tensor([[1.0, 2.0]])) * torch.tensor([[10.0, 100.0]])
    assert torch.equal(activation.silu_and_mul(gate_up), expected)


def test_extreme_gates_neither_overflow_nor_lose_their_sign(device: torch.device) -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 3e38], device=device)
    out = activation.silu_and_mul(torch.stack((gate, torch.ones_like(gate)), 0).view(1, -1), backend="triton")
    torch.testing.assert_close(out[0], gate.clamp(min=0.0), rtol=1e-6, atol=1e-6)


def test_rows_of_a_wider_tensor_are_taken_by_stride(device: torch.device) -> None:
    wide = torch.randn(4, 48, device=device)
    out = activation.silu_and_mul(wide[:, 8:40], backend="triton")
    torch.testing.assert_close(out, reference.silu_and_mul(wide[:, 8:40]))


@pytest.mark.parametrize("bad", [torch.ones(2, 7), torch.ones(8), torch.ones(4, 2).T])
def test_misfits_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(UnsupportedShapeError, match="side by side"):
        activation.silu_and_mul(bad)
