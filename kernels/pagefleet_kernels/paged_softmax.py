"""The loop that all attention kernels share: queries of one key head against a range of a sequence's pages.

Softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867) in float32 and base 2. Whatever changes a score or
hides a key belongs into this file, so that prefill, decode and cascade get it together. Tiles that every row sees whole
run in a loop of their own, without masks. Shapes: M query rows, N keys of a tile, D padded head dim.
"""

from __future__ import annotations

from math import e, log2

import torch

from pagefleet_kernels import _triton
from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.fp8 import decode_fp8

LOG2_E = log2(e)


@jit()
def dot(a, b, acc, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a @ b in float32, without the rounding of float32 inputs to TF32.

    UPCAST is for the interpreter, which would multiply the bit patterns of bfloat16.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit()
def load_pages(  # type: ignore[no-untyped-def]
    block_table_ptr, tile_start, first_key, end_key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Entries of the block table for a tile: [N], one for each key, or a single one if the tile lies within a page."""
    if BLOCK_SIZE % BLOCK_N == 0:
        pages = tl.load(block_table_ptr + tile_start // BLOCK_SIZE, mask=tile_start < end_key, other=0)
    else:
        key_N = tile_start + tl.arange(0, BLOCK_N)
        used_N = (key_N >= first_key) & (key_N < end_key)
        pages = tl.load(block_table_ptr + key_N // BLOCK_SIZE, mask=used_N, other=0)
    return pages


@jit()
def page_offsets(  # type: ignore[no-untyped-def]
    pages, tile_start, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Offsets [N] of a tile's keys from the start of their head in the pool, in elements.

    64-bit, because blocks times elements per block passes 2^31 in a large pool.
    """
    key_N = tl.arange(0, BLOCK_N)
    # the same, but where a tile lies within a page the compiler sees that its rows follow each other
    slot_N = tile_start % BLOCK_SIZE + key_N if BLOCK_SIZE % BLOCK_N == 0 else (tile_start + key_N) % BLOCK_SIZE
    return pages.to(tl.int64) * stride_block + slot_N * stride_slot


@jit()
def load_tile(ptr, offset_N, in_range_N, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values [N, D] of a tile, zero outside; without any mask where everything is inside."""
    dim_D = tl.arange(0, DIM_PADDED)
    ptr_ND = ptr + offset_N[:, None] + dim_D[None, :]
    if MASKED:
        return tl.load(ptr_ND, mask=in_range_N[:, None] & (dim_D < HEAD_DIM)[None, :], other=0.0)
    if DIM_PADDED != HEAD_DIM:
        return tl.load(ptr_ND, mask=(dim_D < HEAD_DIM)[None, :], other=0.0)
    return tl.load(ptr_ND)


@jit()
def as_operand(tile_ND, dtype: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile in the dtype of the queries; FP8: it holds bytes, see `fp8_form`."""
    if FP8:
        return decode_fp8(tile_ND, FP8, NATIVE_FP8).to(dtype)
    return tile_ND.to(dtype)


@jit()
def _change_scores(  # type: ignore[no-untyped-def]
    scores_MN, distance_MN, slope_M, score_scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):
    """Scale, cap and tilt the products of queries and keys; left as they are if nothing follows the scaling."""
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), right at both infinities
        scores_MN = softcap - 2.0 * softcap / (tl.exp2(scores_MN * score_scale) + 1.0)
    elif ALIBI:
        scores_MN = scores_MN * score_scale
    if ALIBI:
        scores_MN += slope_M[:, None] * distance_MN.to(tl.float32)
    return scores_MN


@jit()
def _visible(  # type: ignore[no-untyped-def]
    in_range_N, key_N, query_position_M, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr
):
    """Which keys each row sees, [M, N]."""
    visible_MN = in_range_N[None, :]
    if CAUSAL:
        visible_MN = visible_MN & (key_N[None, :] <= query_position_M[:, None])
    if WINDOW > 0:
        visible_MN = visible_MN & (key_N[None, :] > query_position_M[:, None] - WINDOW)
    if CHUNK > 0:
        visible_MN = visible_MN & (key_N[None, :] >= (query_position_M // CHUNK * CHUNK)[:, None])
    return visible_MN


@jit()
def attend_tiles(  # type: ignore[no-untyped-def]
    q_MD,
    acc_MD,
    row_max_M,
    row_sum_M,
    query_position_M,
    slope_M,
    begin,
    end,
    first_key,
    end_key,
    block_table_ptr,
    key_ptr,
    value_ptr,
    stride_block,
    stride_slot,
    score_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the tiles from position `begin` to `end`; of them the keys first_key to end_key are there at all.

    MASKED: some row may not see some key of them. `score_scale` holds log2(e), or with SOFTCAP twice that over the cap,
    and `softcap` the cap times log2(e). Takes and returns the weighted sum of values [M, D], not yet divided, the
    maximal score [M] (-inf where no key was visible yet), and the sum of weights [M].
    """
    DIM_PADDED: tl.constexpr = q_MD.shape[1]
    zeros_MN = tl.zeros([q_MD.shape[0], BLOCK_N], tl.float32)
    # read one tile ahead: otherwise Triton spends the stages of its pipeline on the table, not on keys and values
    next_pages = load_pages(block_table_ptr, begin, first_key, end_key, BLOCK_SIZE, BLOCK_N)
    for tile_start in range(begin, end, BLOCK_N):
        pages = next_pages
        next_pages = load_pages(block_table_ptr, tile_start + BLOCK_N, first_key, end_key, BLOCK_SIZE, BLOCK_N)
        key_N = tile_start + tl.arange(0, BLOCK_N)
        in_range_N = (key_N >= first_key) & (key_N < end_key)
        offset_N = page_offsets(pages, tile_start, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N)
        k_ND = load_tile(key_ptr, offset_N, in_range_N, HEAD_DIM, DIM_PADDED, MASKED)
        k_ND = as_operand(k_ND, q_MD.dtype, FP8, NATIVE_FP8)
        scores_MN = dot(q_MD, tl.trans(k_ND), zeros_MN, UPCAST)
        scores_MN = _change_scores(
            scores_MN, key_N[None, :] - query_position_M[:, None], slope_M, score_scale, softcap, SOFTCAP, ALIBI
        )
        if MASKED:
            visible_MN = _visible(in_range_N, key_N, query_position_M, WINDOW, CHUNK, CAUSAL)
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))

        tile_max_M = tl.max(scores_MN, axis=1)
        if not (SOFTCAP or ALIBI):
            # scaling is left to the exponent below, where it is one fused multiply-add
            tile_max_M = tile_max_M * score_scale
        new_max_M = tl.maximum(row_max_M, tile_max_M)
        base_M = new_max_M
        if MASKED:
            # a row may not have seen any key yet: -inf - -inf is not a number
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(row_max_M - base_M)
        if SOFTCAP or ALIBI:
            weights_MN = tl.exp2(scores_MN - base_M[:, None])
        else:
            weights_MN = tl.exp2(scores_MN * score_scale - base_M[:, None])
        row_sum_M = row_sum_M * rescale_M + tl.sum(weights_MN, axis=1)
        row_max_M = new_max_M
        v_ND = load_tile(value_ptr, offset_N, in_range_N, HEAD_DIM, DIM_PADDED, MASKED)
        v_ND = as_operand(v_ND, q_MD.dtype, FP8, NATIVE_FP8)
        acc_MD = dot(weights_MN.to(q_MD.dtype), v_ND, acc_MD * rescale_M[:, None], UPCAST)
    return acc_MD, row_max_M, row_sum_M


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether `dot` must go through float32 in this process."""
    return _triton.INTERPRETED and dtype == torch.bfloat16
