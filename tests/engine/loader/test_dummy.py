"""Random weights: what is drawn, and that it is drawn where the weights are."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.layers.weight import Placement, Weight
from pagefleet_engine.loader.load import fill_at_random
from pagefleet_engine.loader.weight_map import Destination, weight_map
from torch import Tensor


def slots(device: str, rows: int, installed: dict[str, Tensor]) -> dict[str, Destination]:
    placement = Placement(torch.bfloat16, torch.device(device), use_kernels=False)

    def weight(name: str, parts: tuple[int, ...], columns: int | None) -> tuple[str, Weight]:
        return name, Weight(parts, columns, placement, lambda tensor: installed.update({name: tensor}))

    return weight_map(
        [
            weight("layers.0.mlp.gate_up_proj.weight", (rows, rows), 512),
            weight("layers.0.mlp.down_proj.weight", (rows,), 512),
            weight("layers.0.input_layernorm.weight", (512,), None),
        ]
    )


def drawn(seed: int, device: str = "cpu", rows: int = 300) -> dict[str, Tensor]:
    installed: dict[str, Tensor] = {}
    fill_at_random(slots(device, rows, installed), seed)
    return installed


def check_distribution(weights: dict[str, Tensor]) -> None:
    merged = weights["layers.0.mlp.gate_up_proj.weight"].float()
    assert merged.std().item() == pytest.approx(0.02, rel=0.02)
    assert merged.mean().item() == pytest.approx(0.0, abs=5e-4)
    assert not torch.equal(merged[: len(merged) // 2], merged[len(merged) // 2 :])
    assert (weights["layers.0.input_layernorm.weight"] == 1).all()


def test_matrices_are_normal_and_norms_are_one() -> None:
    check_distribution(drawn(1))


def test_a_seed_says_all() -> None:
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.mlp.down_proj.weight"], other["layers.0.mlp.down_proj.weight"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_its_own() -> None:
    weights = drawn(1, "cuda")
    check_distribution(weights)
    assert {tensor.device.type for tensor in weights.values()} == {"cuda"}
