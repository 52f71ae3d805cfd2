"""Causal attention of ragged queries over the paged pool: whole prompts, chunks of them, decodes, or all in one batch.

Shapes: T query tokens of all sequences, S sequences, N query heads, K key heads, G = N / K, H head dim, B blocks per
table. The grid depends on T and S alone, so nothing waits for the device and one CUDA graph serves all lengths. After
Dao, arXiv 2307.08691.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.paged_softmax import LOG2_E, attend_pages, check_attention, needs_upcast, window_size
from pagefleet_kernels.tuning import attention_tile, launch_table, padded_head_dim


def varlen_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [T, N, H] of queries whose keys and values are already in the pages.

    The queries of sequence s are rows query_start_loc[s] to query_start_loc[s + 1] of q; query j of them is at position
    `seq_lens[s] - query_len + j` and sees the keys up to there, of which only the last `sliding_window` if that is set.
    `seq_lens` counts all keys, these tokens included. `max_query_len` bounds the query lengths (host side, no wait).
    Table entries past a sequence's end are never used. Query head n reads key head n // G. Rows past
    query_start_loc[S] (padding of a graph) have no meaning in the output. Index tensors are int32 or int64.
    """
    check_attention(q_TNH, kv_cache, block_tables_SB, seq_lens_S)
    num_seqs = seq_lens_S.shape[0]
    if query_start_loc_S1.shape != (num_seqs + 1,):
        raise UnsupportedShapeError(
            f"{num_seqs} sequences need {num_seqs + 1} query starts, not {list(query_start_loc_S1.shape)}"
        )
    window = window_size(sliding_window)
    if choose_backend(q_TNH.device, backend) == "torch":
        return reference.varlen_attention(
            q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S, scale, max_query_len, sliding_window
        )
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if out_TNH.numel() and seq_lens_S.shape[0]:
        batch = block_tables_SB, query_start_loc_S1, seq_lens_S
        _launch(out_TNH, q_TNH, kv_cache, batch, scale, max_query_len, window)
    return out_TNH


def _launch(
    out_TNH: torch.Tensor,
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    max_query_len: int,
    window: int,
) -> None:
    """Choose the tile and start the kernel; `batch` holds block tables, query starts and sequence lengths."""
    block_tables_SB, query_start_loc_S1, seq_lens_S = batch
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_seqs = seq_lens_S.shape[0]
    keys, values = split_kv(kv_cache)
    num_kv_heads, block_size = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    tile = attention_tile(launch_table(architecture(q_TNH.device)).prefill, head_dim, q_TNH.dtype)
    # short queries need no tall tile; a whole group of heads must fit into one
    block_m = max(min(tile.block_m, next_power_of_2(max_query_len * group)), next_power_of_2(group), 16)
    block_q = block_m // group
    _varlen_attention_kernel[(num_tokens // block_q + num_seqs, num_kv_heads)](
        out_TNH,
        q_TNH,
        keys,
        values,
        block_tables_SB,
        query_start_loc_S1,
        seq_lens_S,
        num_seqs,
        scale * LOG2_E,
        q_TNH.stride(0),
        q_TNH.stride(1),
        block_tables_SB.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=tile.block_n,
        WINDOW=window,
        UPCAST=needs_upcast(q_TNH.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILE_OPTIONS,
    )


@jit()
def _find_sequence(  # type: ignore[no-untyped-def]
    query_start_loc_ptr, query_block, num_seqs, BLOCK_Q: tl.constexpr
):
    """Index of the sequence that a block of queries belongs to, by binary search.

    Sequence s owns the blocks from query_start_loc[s] // BLOCK_Q + s on: enough for its queries however the divisions
    round, and at most one too many, which finds nothing to do.
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle - 1
    return low


@jit(do_not_specialize=("num_seqs", "stride_table"))
def _varlen_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_seqs,
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
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per BLOCK_Q queries of one sequence and key head; rows are (query, head of the group) pairs."""
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc_ptr, query_block, num_seqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    first_query = (query_block - query_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_query
    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    dim_D = tl.arange(0, DIM_PADDED)
    mask_MD = ((row_M < BLOCK_Q * GROUP) & (query_M < query_len))[:, None] & (dim_D < HEAD_DIM)[None, :]
    token_M = (query_start + query_M).to(tl.int64)
    q_offset_M = token_M * stride_q_token + head_M * stride_q_head
    q_MD = tl.load(q_ptr + q_offset_M[:, None] + dim_D[None, :], mask=mask_MD, other=0.0)

    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    acc_MD, _, row_sum_M = attend_pages(
        q_MD,
        first_position + row_M // GROUP,
        first_key,
        tl.minimum(first_position + BLOCK_Q, seq_len),
        block_tables_ptr + seq.to(tl.int64) * stride_table,
        key_ptr + kv_head.to(tl.int64) * stride_head,
        value_ptr + kv_head.to(tl.int64) * stride_head,
        stride_block,
        stride_slot,
        score_scale,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        UPCAST,
    )
    out_MD = acc_MD / tl.where(row_sum_M > 0, row_sum_M, 1.0)[:, None]
    out_offset_M = (token_M * HEADS + head_M) * HEAD_DIM
    tl.store(out_ptr + out_offset_M[:, None] + dim_D[None, :], out_MD.to(q_MD.dtype), mask=mask_MD)
