"""Attention of one query per sequence over the paged pool, each context cut into parts that run side by side.

Shapes: S sequences, N query heads, K key heads, G = N / K, H head dim, B blocks per table, P parts of a context. A
second kernel merges the parts. The grid depends on shapes alone, so one CUDA graph serves all lengths. After the
split-KV decoding of Dao et al., pytorch.org/blog/flash-decoding.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.paged_softmax import LOG2_E, attend_pages, check_attention, needs_upcast, window_size
from pagefleet_kernels.tuning import attention_tile, decode_splits, launch_table, padded_head_dim


def decode_attention(
    q_SNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    *,
    num_splits: int | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [S, N, H] of each sequence's last token, whose key and value are already in the pages.

    `seq_lens` counts that token; a length of 0 (padding of a graph) gives zeros. With `sliding_window` only that many
    last keys are seen. `num_splits` (a power of two) fixes the number of parts, which otherwise follows the batch size
    and so changes the rounding between batches. Query head n reads key head n // G. Index tensors are int32 or int64.
    """
    check_attention(q_SNH, kv_cache, block_tables_SB, seq_lens_S)
    num_seqs = q_SNH.shape[0]
    if num_seqs != seq_lens_S.shape[0]:
        raise UnsupportedShapeError(f"decode takes one query per sequence: {num_seqs} for {seq_lens_S.shape[0]}")
    if num_splits is not None and (num_splits < 1 or num_splits & (num_splits - 1)):
        raise UnsupportedShapeError(f"num_splits must be a power of two, not {num_splits}")
    window = window_size(sliding_window)
    if choose_backend(q_SNH.device, backend) == "torch":
        return reference.decode_attention(q_SNH, kv_cache, block_tables_SB, seq_lens_S, scale, sliding_window)
    out_SNH = torch.empty(q_SNH.shape, dtype=q_SNH.dtype, device=q_SNH.device)
    if num_seqs:
        _launch(out_SNH, q_SNH, kv_cache, block_tables_SB, seq_lens_S, scale, window, num_splits)
    return out_SNH


def _launch(
    out_SNH: torch.Tensor,
    q_SNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    window: int,
    num_splits: int | None,
) -> None:
    """Choose the tile and the number of parts, and start both kernels."""
    num_seqs, num_heads, head_dim = q_SNH.shape
    keys, values = split_kv(kv_cache)
    num_kv_heads, block_size = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    table = launch_table(architecture(q_SNH.device))
    tile = attention_tile(table.decode, head_dim, q_SNH.dtype)
    if num_splits is None:
        longest = block_tables_SB.shape[1] * block_size
        longest = min(longest, window) if window else longest
        num_splits = decode_splits(table, num_seqs * num_kv_heads, longest, tile.block_n)
    dim_padded = padded_head_dim(head_dim)
    # with one part the first kernel writes the output itself
    num_parts = num_splits if num_splits > 1 else 0
    part_SNPH = torch.empty((num_seqs, num_heads, num_parts, head_dim), dtype=torch.float32, device=q_SNH.device)
    log_sum_SNP = torch.empty((num_seqs, num_heads, num_parts), dtype=torch.float32, device=q_SNH.device)
    _decode_attention_kernel[(num_seqs, num_kv_heads, num_splits)](
        out_SNH,
        part_SNPH,
        log_sum_SNP,
        q_SNH,
        keys,
        values,
        block_tables_SB,
        seq_lens_S,
        scale * LOG2_E,
        q_SNH.stride(0),
        q_SNH.stride(1),
        block_tables_SB.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        BLOCK_M=max(tile.block_m, next_power_of_2(group)),
        BLOCK_N=tile.block_n,
        SPLITS=num_splits,
        WINDOW=window,
        UPCAST=needs_upcast(q_SNH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILE_OPTIONS,
    )
    if num_splits > 1:
        _merge_parts_kernel[(num_seqs * num_heads,)](
            out_SNH,
            part_SNPH,
            log_sum_SNP,
            HEAD_DIM=head_dim,
            DIM_PADDED=dim_padded,
            SPLITS=num_splits,
            **COMPILE_OPTIONS,
        )


@jit(do_not_specialize=("stride_table",))
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sum_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    score_scale,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_block,
    stride_head,
    stride_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per sequence, key head and part; rows are the heads of the group, so that each key is read once."""
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    tiles_per_part = tl.cdiv(tl.cdiv(seq_len - window_start, BLOCK_N), SPLITS)
    first_key = window_start + part * tiles_per_part * BLOCK_N

    row_M = tl.arange(0, BLOCK_M)
    head_M = kv_head * GROUP + row_M
    dim_D = tl.arange(0, DIM_PADDED)
    mask_MD = (row_M < GROUP)[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_offset_M = seq * stride_q_token + head_M * stride_q_head
    q_MD = tl.load(q_ptr + q_offset_M[:, None] + dim_D[None, :], mask=mask_MD, other=0.0)
    acc_MD, row_max_M, row_sum_M = attend_pages(
        q_MD,
        seq_len - 1 + row_M * 0,
        first_key,
        tl.minimum(first_key + tiles_per_part * BLOCK_N, seq_len),
        block_tables_ptr + seq * stride_table,
        key_ptr + kv_head * stride_head,
        value_ptr + kv_head * stride_head,
        stride_block,
        stride_slot,
        score_scale,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        UPCAST,
    )
    seen_M = row_sum_M > 0
    divisor_M = tl.where(seen_M, row_sum_M, 1.0)
    out_MD = acc_MD / divisor_M[:, None]
    out_row_M = seq * HEADS + head_M
    if SPLITS == 1:
        tl.store(out_ptr + out_row_M[:, None] * HEAD_DIM + dim_D[None, :], out_MD.to(q_MD.dtype), mask=mask_MD)
    else:
        part_row_M = out_row_M * SPLITS + part
        log_sum_M = tl.where(seen_M, row_max_M + tl.log2(divisor_M), float("-inf"))
        tl.store(part_ptr + part_row_M[:, None] * HEAD_DIM + dim_D[None, :], out_MD, mask=mask_MD)
        tl.store(log_sum_ptr + part_row_M, log_sum_M, mask=row_M < GROUP)


@jit()
def _merge_parts_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sum_ptr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per sequence and head: the mean of the parts, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    part_P = tl.arange(0, SPLITS)
    dim_D = tl.arange(0, DIM_PADDED)
    mask_D = dim_D < HEAD_DIM
    log_sum_P = tl.load(log_sum_ptr + row * SPLITS + part_P)
    largest = tl.max(log_sum_P, axis=0)
    weight_P = tl.exp2(log_sum_P - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight_P, axis=0)
    offset_PD = (row * SPLITS + part_P)[:, None] * HEAD_DIM + dim_D[None, :]
    parts_PD = tl.load(part_ptr + offset_PD, mask=mask_D[None, :], other=0.0)
    out_D = tl.sum(parts_PD * weight_P[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dim_D, out_D.to(out_ptr.dtype.element_ty), mask=mask_D)
