"""RMSNorm of hidden states and of heads, by torch and by the kernels' twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pagefleet_engine.layers.norm import HeadNorm, ProjectionNorm, RMSNorm
from pagefleet_engine.layers.weight import Placement

from tests.fakes.native_kernels import native_library

EPS = 1e-5


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x: torch.Tensor, weight: torch.Tensor, unit_offset: bool = False) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + unit_offset)


@pytest.fixture(params=["torch", "kernels", "native"])
def place(request: pytest.FixtureRequest) -> Placement:
    native = native_library() if request.param == "native" else None
    return Placement(torch.float32, torch.device("cpu"), use_kernels=request.param == "kernels", native=native)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("unit_offset", [False, True])
@torch.inference_mode()
def test_rms_norm(place: Placement, scale: float, unit_offset: bool) -> None:
    norm, weight, x = RMSNorm(24, EPS, place, unit_offset), numbers(24, seed=0), numbers(5, 24, seed=1) * scale
    dict(norm.weights())["weight"].fill(0, weight)
    kept = x.clone()
    expected = exact(x, weight, unit_offset)
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept), "the residual stream reads x again"
    residual = numbers(5, 24, seed=2)
    torch.testing.assert_close(norm.add_to(residual.clone(), x).double(), residual + expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_weight_stored_less_one_is_used_in_float32(place: Placement) -> None:
    """In bfloat16 1 + 1/512 would be 1."""
    norm = RMSNorm(8, EPS, replace(place, dtype=torch.bfloat16), unit_offset=True)
    dict(norm.weights())["weight"].fill(0, torch.full((8,), 2.0**-9))
    x = numbers(64, 8, seed=3).bfloat16()
    ratio = norm(x).double() / exact(x, torch.full((8,), 2.0**-9), unit_offset=True)
    assert abs(ratio.mean() - 1.0) < 2.0**-11
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2.0**-7, rtol=0)


@pytest.mark.parametrize("order", [("q_norm", "k_norm"), ("k_norm", "q_norm")])
@torch.inference_mode()
def test_head_norm_gives_queries_and_keys_their_own_weights(place: Placement, order: tuple[str, str]) -> None:
    norm = HeadNorm(3, 2, 8, EPS, place)
    weights = {"q_norm": numbers(8, seed=0), "k_norm": numbers(8, seed=1)}
    slots = dict(norm.weights())
    for name in order:
        slots[f"{name}.weight"].fill(0, weights[name])
    heads = numbers(4, 7, 8, seed=2)  # the last two are values
    kept, out = heads.clone(), norm(heads[:, :5])
    torch.testing.assert_close(out[:, :3].double(), exact(heads[:, :3], weights["q_norm"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[:, 3:].double(), exact(heads[:, 3:5], weights["k_norm"]), atol=1e-5, rtol=1e-5)
    assert torch.equal(heads, kept)


@torch.inference_mode()
def test_projection_norm_takes_all_heads_together(place: Placement) -> None:
    norm, weights = ProjectionNorm(24, 16, EPS, place), {"q_norm": numbers(24, seed=0), "k_norm": numbers(16, seed=1)}
    for name, slot in norm.weights():
        slot.fill(0, weights[name.removesuffix(".weight")])
    qkv = numbers(4, 56, seed=2)
    out = norm(qkv.clone()).double()
    torch.testing.assert_close(out[:, :24], exact(qkv[:, :24], weights["q_norm"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[:, 24:40], exact(qkv[:, 24:40], weights["k_norm"]), atol=1e-5, rtol=1e-5)
    assert torch.equal(out[:, 40:], qkv[:, 40:].double())
