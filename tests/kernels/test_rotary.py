"""Rotary embedding against its twin, and the twin against transformers and complex rotation."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels import reference, rotary
from pagefleet_kernels.errors import UnsupportedShapeError
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Close = Callable[[torch.Tensor, torch.Tensor], None]


def cos_sin_cache(num_positions: int, rotary_dim: int, base: float = 10_000.0) -> torch.Tensor:
    frequency = base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(num_positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (80, 32), (128, 64)])
def test_triton_matches_the_twin(
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Close,
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim).to(dtype).to(device)
    q_TNH, k_TKH = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
    cache = cos_sin_cache(300, rotary_dim).to(device)
    positions = torch.tensor([0, 299, 7, 7, 131], device=device)
    before = qkv.clone()
    q, k = rotary.apply_rope(q_TNH, k_TKH, cache, positions, backend="triton")
    expected_q, expected_k = reference.apply_rope(q_TNH, k_TKH, cache, positions)
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(q[..., rotary_dim:], q_TNH[..., rotary_dim:])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_cache_of_the_model_dtype_and_either_integer(
    position_dtype: torch.dtype, device: torch.device, assert_close: Close
) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(2, 3, 2, 64).to(torch.float16).to(device)
    cache = cos_sin_cache(10, 64).to(torch.float16).to(device)
    positions = torch.tensor([9, 0, 4], dtype=position_dtype, device=device)
    out = rotary.apply_rope(q, k, cache, positions, backend="triton")
    expected = rotary.apply_rope(q, k, cache, positions, backend="torch")
    assert_close(out[0], expected[0])
    assert_close(out[1], expected[1])


def test_twin_matches_transformers() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    cache, positions = cos_sin_cache(50, 64), torch.tensor([3, 49, 0, 1, 2, 3])
    cos, sin = cache[positions].chunk(2, dim=-1)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    out_q, out_k = rotary.apply_rope(q, k, cache, positions)
    torch.testing.assert_close(out_q, expected_q)
    torch.testing.assert_close(out_k, expected_k)


@settings(deadline=None)
@given(position=st.integers(0, 99), shift=st.integers(0, 99), half=st.integers(1, 16), seed=st.integers(0, 99))
def test_scores_depend_on_distance_alone_and_lengths_are_kept(position: int, shift: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 2 * half, generator=generator, dtype=torch.float32)
    cache = cos_sin_cache(400, 2 * half)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated_q, _ = rotary.apply_rope(q, k, cache, torch.tensor([query_position]))
        _, rotated_k = rotary.apply_rope(q, k, cache, torch.tensor([key_position]))
        torch.testing.assert_close(rotated_q.norm(), q.norm(), rtol=1e-4, atol=1e-4)
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(
        score(position + 7, position), score(position + shift + 7, position + shift), rtol=1e-3, atol=1e-3
    )


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty(0, 2, 64, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    q, k = rotary.apply_rope(empty, empty, cos_sin_cache(4, 64).to(device), positions, backend="triton")
    assert q.shape == k.shape == (0, 2, 64)


def test_misfits_are_refused() -> None:
    q, cache, positions = torch.ones(2, 4, 64), cos_sin_cache(8, 64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedShapeError, match="equal T and H"):
        rotary.apply_rope(q, torch.ones(2, 4, 32), cache, positions)
    with pytest.raises(UnsupportedShapeError, match="as many positions"):
        rotary.apply_rope(q, q, cache, positions[:1])
    with pytest.raises(UnsupportedShapeError, match="even R"):
        rotary.apply_rope(q, q, cos_sin_cache(8, 128), positions)
    with pytest.raises(UnsupportedShapeError, match="contiguous"):
        rotary.apply_rope(q.transpose(1, 2).contiguous().transpose(1, 2), q, cache, positions)
