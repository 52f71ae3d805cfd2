"""What attention over latents (MLA) keeps of a token, put into its pages.

Shapes: T tokens, N heads, H size of a query, R rank of the latent, Q rotated dimensions, W = R + Q, P positions.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_latents
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes, fp8_form, has_native_fp8
from pagefleet_kernels.kv_cache import store_kv
from pagefleet_kernels.norm import apply_norm
from pagefleet_kernels.tuning import launch_table


def prepare_latents(
    q_TNH: torch.Tensor,
    kept_TW: torch.Tensor,
    norm_R: torch.Tensor,
    table_PQ: torch.Tensor,
    positions_T: torch.Tensor,
    latents: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
    scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Normalise latents, rotate what follows them, store both; rotate the last Q of every query in place, and return q.

    `kept` holds latents [T, R] and behind them [T, Q]; `table` cosines, then sines, of half the rotated dimensions.
    What rotates against each other are neighbours where `interleaved`, else one half and the other. `latents` is a
    layer's pages, [num_blocks, block_size, W], strided; tokens of slot -1 are not stored. A pool of fp8 gets
    `value / scale`. Rounds where norm, rotation and `write_kv` by themselves would.
    """
    _check(q_TNH, kept_TW, norm_R, table_PQ, latents)
    if choose_backend(q_TNH.device, backend) == "torch":
        return reference_latents.prepare_latents(
            q_TNH, kept_TW, norm_R, table_PQ, positions_T, latents, slot_mapping_T, eps, scale, interleaved=interleaved
        )
    num_tokens, num_heads, head_dim = q_TNH.shape
    if num_tokens == 0:
        return q_TNH
    rotated, rank = table_PQ.shape[1], norm_R.shape[0]
    half_padded = next_power_of_2(rotated // 2)
    tile = launch_table(architecture(q_TNH.device)).tile_elements
    block_heads = min(next_power_of_2(num_heads), max(1, tile // half_padded))
    _prepare_latents_kernel[(num_tokens, 1 + -(-num_heads // block_heads))](
        q_TNH,
        kept_TW,
        norm_R,
        table_PQ,
        positions_T,
        as_bytes(latents),
        slot_mapping_T,
        q_TNH.stride(0),
        q_TNH.stride(1),
        kept_TW.stride(0),
        table_PQ.stride(0),
        latents.stride(0),
        latents.stride(1),
        eps,
        scale,
        HEADS=num_heads,
        NOPE=head_dim - rotated,
        RANK=rank,
        RANK_PADDED=next_power_of_2(rank),
        ROTATED=rotated,
        HALF_PADDED=half_padded,
        BLOCK_SIZE=latents.shape[1],
        BLOCK_HEADS=block_heads,
        INTERLEAVED=interleaved,
        FP8=fp8_form(latents.dtype),
        NATIVE=has_native_fp8(latents.device),
        **COMPILE_OPTIONS,
    )
    return q_TNH


def _check(q: torch.Tensor, kept: torch.Tensor, norm: torch.Tensor, table: torch.Tensor, latents: torch.Tensor) -> None:
    width = norm.shape[0] + table.shape[1]
    if kept.shape != (q.shape[0], width) or latents.dim() != 3 or latents.shape[2] != width:
        raise UnsupportedShapeError(
            f"latents of {norm.shape[0]} and {table.shape[1]} rotated numbers are [T, {width}] and in pages "
            f"[num_blocks, block_size, {width}], not {list(kept.shape)} and {list(latents.shape)}"
        )
    if q.dim() != 3 or q.shape[2] < table.shape[1] or table.shape[1] % 2:
        raise UnsupportedShapeError(f"queries {list(q.shape)} must end with the {table.shape[1]} numbers that rotate")
    if any(x.stride(-1) != 1 for x in (q, kept, table, latents)):
        raise UnsupportedShapeError("the last axis of queries, latents, table and pages must be contiguous")


@jit()
def _turned(x_ptr, angle_ptr, mask, first, second, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs at offsets `first` and `second` from `x_ptr`, rotated, in their dtype."""
    pair = tl.arange(0, first.shape[1])
    x = tl.load(x_ptr + first, mask=mask, other=0.0)
    y = tl.load(x_ptr + second, mask=mask, other=0.0)
    cos = tl.load(angle_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)


@jit()
def _prepare_latents_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kept_ptr,
    norm_ptr,
    table_ptr,
    positions_ptr,
    latents_ptr,
    slot_mapping_ptr,
    stride_q_token,
    stride_q_head,
    stride_kept,
    stride_position,
    stride_block,
    stride_slot,
    eps,
    scale,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One program per token for what is kept of it, and one per tile of its heads."""
    half: tl.constexpr = ROTATED // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    angle_ptr = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_position
    pair = tl.arange(0, HALF_PADDED)[None, :]
    if INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + half
    if tile > 0:
        head = (tile - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        to_ptr = q_ptr + token * stride_q_token + head * stride_q_head + NOPE
        q_mask = (head < HEADS) & (pair < half)
        qx, qy = _turned(to_ptr, angle_ptr, q_mask, first, second, half)
        tl.store(to_ptr + first, qx, mask=q_mask)
        tl.store(to_ptr + second, qy, mask=q_mask)
        return
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    kept_ptr += token * stride_kept
    page_ptr = latents_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    column = tl.arange(0, RANK_PADDED)
    inside = column < RANK
    latent = tl.load(kept_ptr + column, mask=inside, other=0.0)[None, :]
    dtype: tl.constexpr = latent.dtype
    values = latent.to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = apply_norm(values, weight, tl.sum(values * values, axis=1), eps, RANK, False, dtype).to(dtype)
    store_kv(page_ptr + column[None, :], normed, scale, inside[None, :], FP8, NATIVE)
    k_mask = pair < half
    kx, ky = _turned(kept_ptr + RANK, angle_ptr, k_mask, first, second, half)
    store_kv(page_ptr + RANK + first, kx, scale, k_mask, FP8, NATIVE)
    store_kv(page_ptr + RANK + second, ky, scale, k_mask, FP8, NATIVE)
