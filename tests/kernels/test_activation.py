"""Activations, gated and alone, against their twins and torch, at widths that fill a tile, part of one, and several."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from pagefleet_kernels import activation, reference
from pagefleet_kernels.errors import UnsupportedShapeError

KINDS = get_args(activation.Kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 100), (2, 1100), (0, 8)])
def test_triton_matches_the_twin(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    kind: activation.Kind,
    device: torch.device,
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(tokens, 2 * width) * 4).to(dtype).to(device)
    out = activation.gated_activation(gate_up, kind, backend="triton")
    assert out.shape == (tokens, width)
    assert_close(out, reference.gated_activation(gate_up, kind))
    alone = activation.activation(gate_up[:, width:], kind, backend="triton")
    assert_close(alone, reference.activation(gate_up[:, width:], kind))


def test_gate_is_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, 2.0, 10.0, 100.0]])
    expected = F.silu(torch.tensor([[1.0, 2.0]])) * torch.tensor([[10.0, 100.0]])
    assert torch.equal(activation.gated_activation(gate_up), expected)


def test_kinds_are_torchs() -> None:
    gate_up = torch.randn(3, 16)
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(activation.gated_activation(gate_up, "silu"), F.silu(gate) * up)
    assert torch.equal(activation.gated_activation(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    assert torch.equal(activation.activation(gate, "gelu"), F.gelu(gate))
    assert torch.equal(activation.activation(gate, "relu"), F.relu(gate))
    with pytest.raises(UnsupportedShapeError, match="choose silu, gelu_tanh, gelu, relu"):
        activation.gated_activation(gate_up, "tanh")  # type: ignore[call-overload]


def test_what_is_no_number_stays_none(device: torch.device) -> None:
    x = torch.full((1, 8), float("nan"), device=device)
    for kind in KINDS:
        assert activation.activation(x, kind, backend="triton").isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_gates_neither_overflow_nor_lose_their_sign(kind: activation.Kind, device: torch.device) -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, 3e38], device=device)
    gate_up = torch.stack((gate, torch.ones_like(gate)), 0).view(1, -1)
    out = activation.gated_activation(gate_up, kind, backend="triton")
    torch.testing.assert_close(out[0], gate.clamp(min=0.0), rtol=1e-6, atol=1e-6)


def test_rows_of_a_wider_tensor_are_taken_by_stride(device: torch.device) -> None:
    wide = torch.randn(4, 48, device=device)
    out = activation.gated_activation(wide[:, 8:40], backend="triton")
    torch.testing.assert_close(out, reference.gated_activation(wide[:, 8:40], "silu"))


@pytest.mark.parametrize("bad", [torch.ones(2, 7), torch.ones(8), torch.ones(4, 2).T])
def test_misfits_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(UnsupportedShapeError, match="side by side"):
        activation.gated_activation(bad)
