"""The rotation that the kernels are held to, against transformers and by what it must keep."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.reference import apply_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def cos_sin_cache(num_positions: int, rotary_dim: int, base: float = 10_000.0) -> torch.Tensor:
    frequency = base ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(num_positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def test_it_is_that_of_transformers() -> None:
    torch.manual_seed(2)
    q, k = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    cache, positions = cos_sin_cache(50, 64), torch.tensor([3, 49, 0, 1, 2, 3])
    cos, sin = cache[positions].chunk(2, dim=-1)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    out_q, out_k = apply_rope(q, k, cache, positions)
    torch.testing.assert_close(out_q, expected_q)
    torch.testing.assert_close(out_k, expected_k)


@settings(deadline=None)
@given(position=st.integers(0, 99), shift=st.integers(0, 99), half=st.integers(1, 16), seed=st.integers(0, 99))
def test_scores_depend_on_distance_alone_and_lengths_are_kept(position: int, shift: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 2 * half, generator=generator, dtype=torch.float32)
    cache = cos_sin_cache(400, 2 * half)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated_q, _ = apply_rope(q, k, cache, torch.tensor([query_position]))
        _, rotated_k = apply_rope(q, k, cache, torch.tensor([key_position]))
        torch.testing.assert_close(rotated_q.norm(), q.norm(), rtol=1e-4, atol=1e-4)
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(
        score(position + 7, position), score(position + shift + 7, position + shift), rtol=1e-3, atol=1e-3
    )
