"""Rotary position embedding in the NeoX arrangement: the first half of a head rotates against its second half.

Shapes: T tokens, N query heads, K key heads, H head dim, P positions in the cache, R rotary dim (R <= H).
Source: Su et al., arXiv 2104.09864. The cache is the caller's, so every scaling variant is only another cache.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError


def apply_rope(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_cache_PR: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys to `positions`; returns two new contiguous tensors and leaves its inputs alone.

    A row of the cache holds R/2 cosines, then R/2 sines, in float32 or the model's dtype. Elements of a head beyond R
    are copied. Inputs may be strided views (slices of a fused QKV projection) whose last axis is contiguous. Computed
    in float32 and rounded once. Every position must be below P: nothing checks it on the device.
    """
    _check(q_TNH, k_TKH, cos_sin_cache_PR, positions_T)
    if choose_backend(q_TNH.device, backend) == "torch":
        return reference.apply_rope(q_TNH, k_TKH, cos_sin_cache_PR, positions_T)
    out_q_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    out_k_TKH = torch.empty(k_TKH.shape, dtype=k_TKH.dtype, device=k_TKH.device)
    num_tokens, num_heads, head_dim = q_TNH.shape
    if num_tokens == 0:
        return out_q_TNH, out_k_TKH
    rotary_dim = cos_sin_cache_PR.shape[1]
    _rope_kernel[(num_tokens,)](
        out_q_TNH,
        out_k_TKH,
        q_TNH,
        k_TKH,
        cos_sin_cache_PR,
        positions_T,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_TKH.stride(0),
        k_TKH.stride(1),
        cos_sin_cache_PR.stride(0),
        HEADS=num_heads,
        KV_HEADS=k_TKH.shape[1],
        HEADS_PADDED=next_power_of_2(num_heads),
        KV_HEADS_PADDED=next_power_of_2(k_TKH.shape[1]),
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HALF_PADDED=next_power_of_2(rotary_dim // 2),
        TAIL_PADDED=next_power_of_2(max(1, head_dim - rotary_dim)),
        **COMPILE_OPTIONS,
    )
    return out_q_TNH, out_k_TKH


def _check(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise UnsupportedShapeError(
            f"queries {list(q.shape)} and keys {list(k.shape)} must be [T, heads, H] with equal T and H"
        )
    if positions.shape != q.shape[:1]:
        raise UnsupportedShapeError(f"{q.shape[0]} tokens need as many positions, not {list(positions.shape)}")
    if cache.dim() != 2 or cache.shape[1] % 2 or not 0 < cache.shape[1] <= q.shape[2]:
        raise UnsupportedShapeError(
            f"a cosine and sine cache of {list(cache.shape)} does not fit heads of {q.shape[2]}: it must be [P, R] "
            "with an even R of at most the head dim"
        )
    if q.stride(2) != 1 or k.stride(2) != 1 or cache.stride(1) != 1:
        raise UnsupportedShapeError("the last axis of queries, keys and the cosine and sine cache must be contiguous")


@jit()
def _rotate_heads(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    cos,
    sin,
    stride_head,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
):
    """Rotate all heads of one token; both pointers are already at the token."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    head = tl.arange(0, HEADS_PADDED)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    mask = (head < HEADS) & (pair < HALF)
    first = tl.load(x_ptr + head * stride_head + pair, mask=mask, other=0.0)
    second = tl.load(x_ptr + head * stride_head + HALF + pair, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    tl.store(out_ptr + head * HEAD_DIM + pair, (x * cos - y * sin).to(first.dtype), mask=mask)
    tl.store(out_ptr + head * HEAD_DIM + HALF + pair, (y * cos + x * sin).to(first.dtype), mask=mask)
    if ROTARY_DIM < HEAD_DIM:
        rest = ROTARY_DIM + tl.arange(0, TAIL_PADDED)[None, :]
        rest_mask = (head < HEADS) & (rest < HEAD_DIM)
        tail = tl.load(x_ptr + head * stride_head + rest, mask=rest_mask, other=0.0)
        tl.store(out_ptr + head * HEAD_DIM + rest, tail, mask=rest_mask)


@jit()
def _rope_kernel(  # type: ignore[no-untyped-def]
    out_q_ptr,
    out_k_ptr,
    q_ptr,
    k_ptr,
    cache_ptr,
    positions_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_position,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    angle_ptr = cache_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_position + pair
    mask = pair < ROTARY_DIM // 2
    cos = tl.load(angle_ptr, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + ROTARY_DIM // 2, mask=mask, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        out_q_ptr + token * HEADS * HEAD_DIM,
        q_ptr + token * stride_q_token,
        cos,
        sin,
        stride_q_head,
        HEADS,
        HEADS_PADDED,
        HEAD_DIM,
        ROTARY_DIM,
        HALF_PADDED,
        TAIL_PADDED,
    )
    _rotate_heads(
        out_k_ptr + token * KV_HEADS * HEAD_DIM,
        k_ptr + token * stride_k_token,
        cos,
        sin,
        stride_k_head,
        KV_HEADS,
        KV_HEADS_PADDED,
        HEAD_DIM,
        ROTARY_DIM,
        HALF_PADDED,
        TAIL_PADDED,
    )
