"""The loop that both attention kernels share: queries of one key head against a range of a sequence's pages.

Softmax is the online one (Milakov and Gimelshein, arXiv 1805.02867) in float32 and base 2. Whatever changes a score or
hides a key belongs into `attend_pages`, so that prefill and decode get it together. Shapes: M query rows, N keys of a
tile, D padded head dim.
"""

from __future__ import annotations

from math import e, log2

import torch

from pagefleet_kernels import _triton
from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.layout import split_kv

LOG2_E = log2(e)


@jit()
def dot(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Matrix product in float32, without the rounding of float32 inputs to TF32.

    UPCAST is for the interpreter, which would multiply the bit patterns of bfloat16.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit()
def attend_pages(  # type: ignore[no-untyped-def]
    q_MD,
    query_position_M,
    first_key,
    end_key,
    block_table_ptr,
    key_ptr,
    value_ptr,
    stride_block,
    stride_slot,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to the keys at positions first_key to end_key of one sequence.

    The pointers are at the sequence's block table and at its key head. Row m sees the keys up to its own position and,
    if WINDOW > 0, only the last WINDOW of them. `score_scale` holds log2(e). Returns the weighted sum of values [M, D],
    not yet divided, the maximal score [M] (-inf where no key is visible), and the sum of weights [M].
    """
    BLOCK_M: tl.constexpr = q_MD.shape[0]
    DIM_PADDED: tl.constexpr = q_MD.shape[1]
    dim_D = tl.arange(0, DIM_PADDED)
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    for tile_start in range(first_key, end_key, BLOCK_N):
        key_position_N = tile_start + tl.arange(0, BLOCK_N)
        in_range_N = key_position_N < end_key
        block_N = tl.load(block_table_ptr + key_position_N // BLOCK_SIZE, mask=in_range_N, other=0)
        # 64-bit: blocks times elements per block passes 2^31 in a large pool
        slot_N = block_N.to(tl.int64) * stride_block + (key_position_N % BLOCK_SIZE) * stride_slot
        offset_ND = slot_N[:, None] + dim_D[None, :]
        mask_ND = in_range_N[:, None] & (dim_D < HEAD_DIM)[None, :]
        k_ND = tl.load(key_ptr + offset_ND, mask=mask_ND, other=0.0)
        v_ND = tl.load(value_ptr + offset_ND, mask=mask_ND, other=0.0)

        scores_MN = dot(q_MD, tl.trans(k_ND.to(q_MD.dtype)), UPCAST) * score_scale
        visible_MN = in_range_N[None, :] & (key_position_N[None, :] <= query_position_M[:, None])
        if WINDOW > 0:
            visible_MN = visible_MN & (key_position_N[None, :] > query_position_M[:, None] - WINDOW)
        scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))

        new_max_M = tl.maximum(row_max_M, tl.max(scores_MN, axis=1))
        # a row may not see any key yet (a window that begins in a later tile): -inf - -inf is not a number
        finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(row_max_M - finite_max_M)
        weights_MN = tl.exp2(scores_MN - finite_max_M[:, None])
        row_sum_M = row_sum_M * rescale_M + tl.sum(weights_MN, axis=1)
        acc_MD = acc_MD * rescale_M[:, None] + dot(weights_MN.to(q_MD.dtype), v_ND.to(q_MD.dtype), UPCAST)
        row_max_M = new_max_M
    return acc_MD, row_max_M, row_sum_M


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether `dot` must go through float32 in this process."""
    return _triton.INTERPRETED and dtype == torch.bfloat16


def window_size(sliding_window: int | None) -> int:
    """The kernels' WINDOW: 0 for none. Raises UnsupportedShapeError for a window that would hide every key."""
    if sliding_window is None:
        return 0
    if sliding_window < 1:
        raise UnsupportedShapeError(
            f"a sliding window must hold at least 1 key, not {sliding_window}; None is no window"
        )
    return sliding_window


def check_attention(
    q_TNH: torch.Tensor, kv_cache: torch.Tensor, block_tables_SB: torch.Tensor, seq_lens_S: torch.Tensor
) -> None:
    """Raise UnsupportedShapeError unless queries, pages and tables fit each other."""
    keys, _ = split_kv(kv_cache)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    if q_TNH.dim() != 3 or q_TNH.shape[2] != head_dim or q_TNH.shape[1] % num_kv_heads:
        raise UnsupportedShapeError(
            f"queries must be [T, N, {head_dim}] with N a multiple of the {num_kv_heads} key heads, "
            f"not {list(q_TNH.shape)}"
        )
    if q_TNH.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise UnsupportedShapeError("the last axis of queries and kv_cache must be contiguous")
    if block_tables_SB.dim() != 2 or block_tables_SB.shape[:1] != seq_lens_S.shape or block_tables_SB.stride(1) != 1:
        raise UnsupportedShapeError(
            f"block tables {list(block_tables_SB.shape)} must have one row, contiguous, for each of the "
            f"{list(seq_lens_S.shape)} sequences"
        )
