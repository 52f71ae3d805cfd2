"""Rotary angles against transformers for each scaling, and the rotation against complex multiplication."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.layers.rotary import RotaryEmbedding
from pagefleet_engine.layers.rotary_frequencies import RopeParameters, angles
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.arch import arch_from_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3"} | LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
]


def place(use_kernels: bool = False, dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(dtype, torch.device("cpu"), use_kernels)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 1e6), (96, 5e5)])
def test_angles_are_those_of_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=131072,
        vocab_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    rope = arch_from_config(config.to_dict(), "config.json").rope
    positions = torch.tensor([0, 1, 2, 63, 1000, 4096])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = angles(rope, head_dim, positions)
    torch.testing.assert_close(ours.cos() * rope.attention_factor, cos[0, :, : head_dim // 2], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours.sin() * rope.attention_factor, sin[0, :, head_dim // 2 :], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours[1].cos() * rope.attention_factor, cos[0, 1, : head_dim // 2], atol=1e-6, rtol=0)


def test_dynamic_base_grows_only_past_the_trained_context() -> None:
    rope = RopeParameters(rope_type="dynamic", factor=2.0, original_max_position=128)
    positions = torch.arange(256)
    ours, plain = angles(rope, 64, positions), angles(RopeParameters(), 64, positions)
    torch.testing.assert_close(ours[:128], plain[:128])
    # The fastest pair turns by one radian per position whatever the base; the slowest turns less and less.
    torch.testing.assert_close(ours[:, 0], plain[:, 0])
    ratio = (ours[1:, -1] / plain[1:, -1])[127:]
    assert ratio[0] < 1.0
    assert (ratio.diff() < 0).all()


@given(
    scaling=st.sampled_from(SCALINGS),
    positions=st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
)
def test_a_row_depends_on_its_own_position_only(scaling: dict[str, Any], positions: list[int]) -> None:
    """Else a cached key would be wrong as soon as its neighbours change."""
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8192,
        "rope_parameters": scaling,
    }
    rope = arch_from_config(config, "config.json").rope
    together = angles(rope, 64, torch.tensor(positions))
    alone = torch.cat([angles(rope, 64, torch.tensor([position])) for position in positions])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_rotation_is_multiplication_by_a_unit_number(use_kernels: bool) -> None:
    rope = RopeParameters(rope_type="yarn", factor=4.0, original_max_position=64, attention_factor=1.5)
    rotary = RotaryEmbedding(rope, 16, 100, place(use_kernels))
    positions = torch.tensor([0, 5, 99])
    heads = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
    q, k = rotary.at(positions).rotate(heads[:, :6], 4, 2)
    assert (q.shape, k.shape) == ((3, 4, 16), (3, 2, 16))
    numbers = torch.complex(heads[:, :6, :8], heads[:, :6, 8:])
    turned = numbers * torch.polar(torch.tensor(1.5), angles(rope, 16, positions))[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(torch.cat((q, k), dim=1), expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_scores_depend_on_distance_only() -> None:
    rotary = RotaryEmbedding(RopeParameters(), 32, 0, place())
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, 32, generator=generator), torch.randn(1, 1, 32, generator=generator)

    def score(query_at: int, key_at: int) -> float:
        q, _ = rotary.at(torch.tensor([query_at])).rotate(query, 1, 0)
        k, _ = rotary.at(torch.tensor([key_at])).rotate(key, 1, 0)
        return float((q * k).sum())

    assert score(40, 7) == pytest.approx(score(133, 100), abs=1e-4)
    assert not math.isclose(score(40, 7), score(41, 7), abs_tol=1e-3)


@torch.inference_mode()
def test_rotation_keeps_the_models_type() -> None:
    heads = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    q, k = RotaryEmbedding(RopeParameters(), 8, 0, place(dtype=torch.bfloat16)).at(torch.arange(2)).rotate(heads, 2, 1)
    assert q.dtype == k.dtype == torch.bfloat16
