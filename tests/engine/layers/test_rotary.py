"""Rotary angles against transformers for each scaling, and the rotation against complex multiplication."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.attention.backend import AttentionSpec, Pages
from pagefleet_engine.layers.norm import TurnedHeadNorm
from pagefleet_engine.layers.rotary import Heads, RotaryEmbedding
from pagefleet_engine.layers.rotary_frequencies import RopeParameters, angles
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.config_file import arch_from_config
from pagefleet_kernels.kv_cache import write_kv
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

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
    rope = arch_from_config(config.to_dict(), "config.json").ropes[0]
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
    rope = arch_from_config(config, "config.json").ropes[0]
    together = angles(rope, 64, torch.tensor(positions))
    alone = torch.cat([angles(rope, 64, torch.tensor([position])) for position in positions])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


class OneLayer:
    """A layer's pages for a step that starts an empty sequence; implements the writing half of `AttentionStep`."""

    def __init__(self, num_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        self._pages = Pages(torch.zeros(num_tokens, 2, kv_heads, 1, head_dim, dtype=dtype), torch.arange(num_tokens))

    def pages(self, spec: AttentionSpec) -> Pages:
        return self._pages

    def write(self, spec: AttentionSpec, k_TKH: torch.Tensor, v_TKH: torch.Tensor | None) -> None:
        assert v_TKH is not None
        write_kv(k_TKH, v_TKH, self._pages.kv_cache, self._pages.slot_mapping_T)

    def attend(self, spec: AttentionSpec, q_TNH: torch.Tensor) -> torch.Tensor:
        raise AssertionError("only writing is tested")

    @property
    def keys(self) -> torch.Tensor:
        return self._pages.kv_cache[:, 0, :, 0]

    @property
    def values(self) -> torch.Tensor:
        return self._pages.kv_cache[:, 1, :, 0]


def rotate(
    rotary: RotaryEmbedding, positions: list[int], qkv_TLH: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as attention gets them."""
    num_kv_heads = (qkv_TLH.shape[1] - num_heads) // 2
    step = OneLayer(len(positions), num_kv_heads, qkv_TLH.shape[2], qkv_TLH.dtype)
    heads = Heads(num_heads, num_kv_heads, None, AttentionSpec(layer=0, scale=1.0))
    q_TNH = rotary.at(torch.tensor(positions)).prepare(heads, qkv_TLH, step)
    return q_TNH, step.keys, step.values


def random_heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.75])
@torch.inference_mode()
def test_rotation_is_multiplication_by_a_unit_number(use_kernels: bool, share: float) -> None:
    """Of the pairs that rotate; the rest of a head, and the values, are as they were."""
    rope = RopeParameters(
        rope_type="yarn", factor=4.0, original_max_position=64, attention_factor=1.5, rotated_share=share
    )
    positions, heads, rotated = [0, 5, 99], random_heads(3, 8, 16), int(16 * share)
    q, k, v = rotate(RotaryEmbedding(rope, 16, 100, place(use_kernels)), positions, heads.clone(), 4)
    assert (q.shape, k.shape) == ((3, 4, 16), (3, 2, 16))
    numbers = torch.complex(heads[:, :6, : rotated // 2], heads[:, :6, rotated // 2 : rotated])
    turned = numbers * torch.polar(torch.tensor(1.5), angles(rope, rotated, torch.tensor(positions)))[:, None]
    expected = torch.cat((turned.real, turned.imag, heads[:, :6, rotated:]), dim=-1)
    torch.testing.assert_close(torch.cat((q, k), dim=1), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(v, heads[:, 6:])


@torch.inference_mode()
def test_scores_depend_on_distance_only() -> None:
    rotary = RotaryEmbedding(RopeParameters(), 32, 0, place())
    heads = random_heads(1, 3, 32)

    def score(query_at: int, key_at: int) -> float:
        q, _, _ = rotate(rotary, [query_at], heads, 1)
        _, k, _ = rotate(rotary, [key_at], heads, 1)
        return float((q * k).sum())

    assert score(40, 7) == pytest.approx(score(133, 100), abs=1e-4)
    assert not math.isclose(score(40, 7), score(41, 7), abs_tol=1e-3)


@pytest.mark.parametrize("use_kernels", [False, True])
@torch.inference_mode()
def test_rotation_keeps_the_models_type(use_kernels: bool) -> None:
    rotary = RotaryEmbedding(RopeParameters(), 8, 2, place(use_kernels, torch.bfloat16))
    q, k, _ = rotate(rotary, [0, 1], random_heads(2, 4, 8, dtype=torch.bfloat16), 2)
    assert q.dtype == k.dtype == torch.bfloat16


def test_keys_without_the_weights_of_their_norm_take_no_scale() -> None:
    """One that was measured with them might be too small for those without."""
    norm = TurnedHeadNorm(2, 1, 16, 1e-6, place(), ("query_layernorm", "key_layernorm"))
    heads = Heads(2, 1, norm, AttentionSpec(layer=0, scale=1.0))
    heads.scale_cache(0.01, 0.5)
    assert (heads.spec.k_scale, heads.spec.v_scale) == (1.0, 0.5)


@pytest.mark.parametrize("longest", [128, 129])
def test_longrope_takes_its_factors_for_the_longest_sequence(longest: int) -> None:
    """Short ones up to the first context, long ones beyond, for each position as transformers has them."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 8.0, 16.0]}
    config = Phi3Config(
        hidden_size=12,
        num_attention_heads=1,
        max_position_embeddings=1024,
        original_max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters=scaling | {"rope_theta": 1e4, "partial_rotary_factor": 0.67},
    )
    arch = arch_from_config(config.to_dict(), "config.json")
    assert (arch.default_length, arch.context_length) == (128, 1024)
    rope = arch.for_length(longest).ropes[0]
    assert rope.rotary_dim(12) == 8
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(longest)[None])
    ours = angles(rope, 8, torch.arange(longest))
    torch.testing.assert_close(ours.cos() * rope.attention_factor, cos[0, :, :4], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.sin() * rope.attention_factor, sin[0, :, 4:], atol=1e-4, rtol=0)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(128)))
