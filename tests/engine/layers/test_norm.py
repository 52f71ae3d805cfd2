"""RMSNorm of hidden states and of heads, by torch and by the kernels' twins."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.layers.norm import HeadNorm, RMSNorm
from pagefleet_engine.layers.weight import Placement

EPS = 1e-5


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def place(request: pytest.FixtureRequest) -> Placement:
    return Placement(torch.float32, torch.device("cpu"), use_kernels=request.param)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@torch.inference_mode()
def test_rms_norm(place: Placement, scale: float) -> None:
    norm, weight, x = RMSNorm(24, EPS, place), numbers(24, seed=0), numbers(5, 24, seed=1) * scale
    dict(norm.weights())["weight"].fill(0, weight)
    kept = x.clone()
    torch.testing.assert_close(norm(x).double(), exact(x, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, kept), "the residual stream reads x again"


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
