"""What happens to a token's heads between their projection and attention, in one kernel and one pass over memory.

Shapes: T tokens, N query heads, K key heads, M = N + 2 K, H head dim, P positions in the table, R rotary dim (R <= H).
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes, fp8_form, has_native_fp8
from pagefleet_kernels.kv_cache import check_write, store_kv
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.norm import apply_norm
from pagefleet_kernels.tuning import launch_table


def prepare_heads(
    qkv_TMH: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to their pages; returns the queries [T, N, H].

    `qkv` holds the heads of queries, keys and values, in that order; it may be a strided view with a contiguous last
    axis. The norms are of single heads, as `rms_norm`'s, both or neither. Rotation is `reference.apply_rope`'s, on the
    first R elements. Pages are written as by `write_kv`: tokens of slot -1 are not, and none where there are no key
    heads. Rounds where those three would.
    """
    _check(qkv_TMH, num_heads, num_kv_heads, cos_sin_PR, positions_T)
    norms = _norms(q_norm_H, k_norm_H, qkv_TMH.shape[2])
    key_heads, value_heads = qkv_TMH[:, num_heads : num_heads + num_kv_heads], qkv_TMH[:, num_heads + num_kv_heads :]
    if num_kv_heads:
        check_write(key_heads, value_heads, kv_cache, slot_mapping_T)
    run = reference.prepare_heads if choose_backend(qkv_TMH.device, backend) == "torch" else _launch
    heads, scales = (num_heads, num_kv_heads), (k_scale, v_scale)
    forms = (unit_offset, interleaved)
    return run(qkv_TMH, heads, cos_sin_PR, positions_T, kv_cache, slot_mapping_T, norms, eps, forms, scales)


def _norms(
    q_norm_H: torch.Tensor | None, k_norm_H: torch.Tensor | None, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if q_norm_H is None and k_norm_H is None:
        return None
    if q_norm_H is None or k_norm_H is None or not q_norm_H.shape == k_norm_H.shape == (head_dim,):
        raise UnsupportedShapeError(f"the norms of queries and keys come together and are {head_dim} long")
    return q_norm_H, k_norm_H


def _launch(
    qkv_TMH: torch.Tensor,
    heads: tuple[int, int],
    cos_sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    forms: tuple[bool, bool],
    scales: tuple[float, float],
) -> torch.Tensor:
    num_tokens, head_dim, rotary_dim = qkv_TMH.shape[0], qkv_TMH.shape[2], cos_sin_PR.shape[1]
    out_TNH = torch.empty((num_tokens, heads[0], head_dim), dtype=qkv_TMH.dtype, device=qkv_TMH.device)
    if num_tokens == 0:
        return out_TNH
    keys, values = split_kv(as_bytes(kv_cache))
    q_norm_H, k_norm_H = (qkv_TMH, qkv_TMH) if norms is None else norms
    tile = launch_table(architecture(qkv_TMH.device)).tile_elements
    block_heads = min(next_power_of_2(max(heads)), max(1, tile // next_power_of_2(head_dim)))
    tiles = -(-heads[0] // block_heads) + 2 * -(-heads[1] // block_heads)
    _prepare_heads_kernel[(num_tokens, tiles)](
        out_TNH,
        keys,
        values,
        qkv_TMH,
        q_norm_H,
        k_norm_H,
        cos_sin_PR,
        positions_T,
        slot_mapping_T,
        qkv_TMH.stride(0),
        qkv_TMH.stride(1),
        cos_sin_PR.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        eps,
        *scales,
        HEADS=heads[0],
        KV_HEADS=heads[1],
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=keys.shape[2],
        BLOCK_HEADS=block_heads,
        HALF_PADDED=next_power_of_2(rotary_dim // 2),
        TAIL_PADDED=next_power_of_2(max(1, head_dim - rotary_dim)),
        DIM_PADDED=next_power_of_2(head_dim),
        HAS_NORM=norms is not None,
        UNIT_OFFSET=forms[0],
        INTERLEAVED=forms[1],
        FP8=fp8_form(kv_cache.dtype),
        NATIVE=has_native_fp8(kv_cache.device),
        **early_launch(kv_cache.device),
        **COMPILE_OPTIONS,
    )
    return out_TNH


def _check(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    if qkv.dim() != 3 or qkv.shape[1] != num_heads + 2 * num_kv_heads or qkv.stride(2) != 1:
        raise UnsupportedShapeError(
            f"heads must be [T, {num_heads + 2 * num_kv_heads}, H] with a contiguous last axis, not {list(qkv.shape)} "
            f"with strides {qkv.stride()}"
        )
    if positions.shape != qkv.shape[:1]:
        raise UnsupportedShapeError(f"{qkv.shape[0]} tokens need as many positions, not {list(positions.shape)}")
    width = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or cos_sin.stride(1) != 1 or width % 2 or not 0 < width <= qkv.shape[2]:
        raise UnsupportedShapeError(
            f"a cosine and sine table of {list(cos_sin.shape)} does not fit heads of {qkv.shape[2]}: it must be [P, R] "
            "with an even R of at most the head dim and a contiguous last axis"
        )


@jit()
def _turned(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    angle_ptr,
    inside,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Both halves of the rotated part and the rest of a tile of heads, in their dtype; `x_ptr` and `inside` are
    columns, one entry per head."""
    pair, rest = tl.arange(0, HALF_PADDED), ROTARY_DIM + tl.arange(0, TAIL_PADDED)
    half: tl.constexpr = ROTARY_DIM // 2
    inside_half, inside_rest = pair < half, rest < HEAD_DIM
    first = 2 * pair if INTERLEAVED else pair
    second = 2 * pair + 1 if INTERLEAVED else half + pair
    x = tl.load(x_ptr + first[None, :], mask=inside & inside_half[None, :], other=0.0)
    y = tl.load(x_ptr + second[None, :], mask=inside & inside_half[None, :], other=0.0)
    z = tl.load(x_ptr + rest[None, :], mask=inside & inside_rest[None, :], other=0.0)
    dtype: tl.constexpr = x.dtype
    x, y, z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1) + tl.sum(z * z, axis=1)
        x_weight = tl.load(norm_ptr + first, mask=inside_half, other=0.0).to(tl.float32)
        y_weight = tl.load(norm_ptr + second, mask=inside_half, other=0.0).to(tl.float32)
        z_weight = tl.load(norm_ptr + rest, mask=inside_rest, other=0.0).to(tl.float32)
        x = apply_norm(x, x_weight, squares, eps, HEAD_DIM, UNIT_OFFSET, dtype).to(dtype).to(tl.float32)
        y = apply_norm(y, y_weight, squares, eps, HEAD_DIM, UNIT_OFFSET, dtype).to(dtype).to(tl.float32)
        z = apply_norm(z, z_weight, squares, eps, HEAD_DIM, UNIT_OFFSET, dtype)
    cos = tl.load(angle_ptr + pair, mask=inside_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + half + pair, mask=inside_half, other=0.0).to(tl.float32)[None, :]
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype), z.to(dtype)


@jit()
def _prepare_heads_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    keys_ptr,
    values_ptr,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    stride_token,
    stride_qkv_head,
    stride_position,
    stride_block,
    stride_head,
    stride_slot,
    eps,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per token and tile of heads: tiles of queries come first, then of keys, then of values."""
    wait_for_inputs(EARLY)
    query_tiles: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    key_tiles: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    first = 2 * pair if INTERLEAVED else pair
    second = 2 * pair + 1 if INTERLEAVED else ROTARY_DIM // 2 + pair
    rest = ROTARY_DIM + tl.arange(0, TAIL_PADDED)[None, :]
    qkv_ptr += token * stride_token
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_position
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    page = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    if tile < query_tiles:
        q_head = tile * BLOCK_HEADS + heads
        q_inside = q_head < HEADS
        q_ptr = qkv_ptr + q_head * stride_qkv_head
        qx, qy, qz = _turned(
            q_ptr, q_norm_ptr, angle_ptr, q_inside, eps,
            HEAD_DIM, ROTARY_DIM, HALF_PADDED, TAIL_PADDED, HAS_NORM, UNIT_OFFSET, INTERLEAVED,
        )  # fmt: skip
        to_ptr = out_ptr + (token * HEADS + q_head) * HEAD_DIM
        q_half = q_inside & (pair < ROTARY_DIM // 2)
        tl.store(to_ptr + first, qx, mask=q_half)
        tl.store(to_ptr + second, qy, mask=q_half)
        if ROTARY_DIM < HEAD_DIM:
            tl.store(to_ptr + rest, qz, mask=q_inside & (rest < HEAD_DIM))
    elif slot >= 0:
        if tile < query_tiles + key_tiles:
            k_head = (tile - query_tiles) * BLOCK_HEADS + heads
            k_inside = k_head < KV_HEADS
            k_ptr = qkv_ptr + (HEADS + k_head) * stride_qkv_head
            kx, ky, kz = _turned(
                k_ptr, k_norm_ptr, angle_ptr, k_inside, eps,
                HEAD_DIM, ROTARY_DIM, HALF_PADDED, TAIL_PADDED, HAS_NORM, UNIT_OFFSET, INTERLEAVED,
            )  # fmt: skip
            key_ptr = keys_ptr + page + k_head * stride_head
            k_half = k_inside & (pair < ROTARY_DIM // 2)
            store_kv(key_ptr + first, kx, k_scale, k_half, FP8, NATIVE)
            store_kv(key_ptr + second, ky, k_scale, k_half, FP8, NATIVE)
            if ROTARY_DIM < HEAD_DIM:
                store_kv(key_ptr + rest, kz, k_scale, k_inside & (rest < HEAD_DIM), FP8, NATIVE)
        else:
            v_head = (tile - query_tiles - key_tiles) * BLOCK_HEADS + heads
            dim = tl.arange(0, DIM_PADDED)[None, :]
            v_inside = (v_head < KV_HEADS) & (dim < HEAD_DIM)
            v = tl.load(qkv_ptr + (HEADS + KV_HEADS + v_head) * stride_qkv_head + dim, mask=v_inside, other=0.0)
            store_kv(values_ptr + page + v_head * stride_head + dim, v, v_scale, v_inside, FP8, NATIVE)
