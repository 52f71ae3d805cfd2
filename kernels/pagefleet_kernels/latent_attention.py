"""Causal attention over paged latents (MLA): queries in the latents' space, which all heads of a token compare with one
vector of each token, and whose values are the first numbers of that vector.

Each tile of latents is read once for keys and values. Rows of a tile are pairs of query and head, heads innermost, so
that many heads or many queries alike fill a tensor core. Contexts of sequences that compute one token are cut into
parts. Shapes: T query tokens, S sequences, N heads, B blocks per table, R rank, Q rotated dimensions, W = R + Q; in
kernels M rows of a tile, K keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels import reference_latents
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.attention_kernel import merge_parts_kernel
from pagefleet_kernels.attention_launch import KV_DTYPES, MERGED_AT_ONCE
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8, LARGEST_FP8, as_bytes, fp8_form, has_native_fp8
from pagefleet_kernels.paged_softmax import LOG2_E, as_operand, dot, load_pages, load_tile, needs_upcast, page_offsets
from pagefleet_kernels.tuning import MIN_DOT_SIDE, WHOLE, Splits, decode_splits, launch_table

MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class LatentTile:
    """One launch shape."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_FLOAT32 = LatentTile(16, 16, 8, 1)
_PLAIN = LatentTile(32, 32, 8, 2)
_FP8 = LatentTile(16, 32, 8, 2)
_DECODED = LatentTile(16, 16, 8, 2)
"""The tallest that the compiler keeps in registers, and that fit the shared memory of every GPU since sm_80; the last
is for e4m3 that is decoded by arithmetic."""


def latent_tile(num_rows: int, dtype: torch.dtype, stored: torch.dtype, *, native_fp8: bool) -> LatentTile:
    """For so many rows, of queries in `dtype` over latents in `stored`; no taller than they need."""
    if dtype == torch.float32:
        return _FLOAT32
    decoded = stored == FP8 and not native_fp8
    tile = _PLAIN if stored not in LARGEST_FP8 else _DECODED if decoded else _FP8
    return replace(tile, block_m=min(tile.block_m, max(MIN_DOT_SIDE, next_power_of_2(num_rows))))


def latent_attention(
    q_TNW: torch.Tensor,
    latents: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    max_query_len: int,
    *,
    rank: int,
    scale: float,
    stored_scale: float = 1.0,
    num_splits: int | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Weighted sums of latents [T, N, R], for queries whose latents are already in the pages.

    Sequences, tables and padding are as in `attention.varlen_attention`. `latents` is a layer's pages, [num_blocks,
    block_size, W], strided; of fp8 a stored number times `stored_scale` is the latent. `num_splits` (a power of two)
    fixes the parts of contexts of one query, which otherwise follow the batch size.
    """
    _check(q_TNW, latents, block_tables_SB, seq_lens_S, rank)
    if choose_backend(q_TNW.device, backend) == "torch":
        starts = None if max_query_len == 1 and len(q_TNW) == len(seq_lens_S) else query_start_loc_S1
        return reference_latents.latent_attention(
            q_TNW, latents, block_tables_SB, starts, seq_lens_S, rank, scale, stored_scale
        )
    num_tokens, num_heads, _ = q_TNW.shape
    num_seqs = seq_lens_S.shape[0]
    uniform = max_query_len == 1 and num_tokens == num_seqs
    native = has_native_fp8(q_TNW.device)
    tile = latent_tile(num_heads, q_TNW.dtype, latents.dtype, native_fp8=native)
    row_blocks = -(-num_heads // tile.block_m)
    splits = Splits(num_splits or 1)
    if num_splits is None:
        longest = block_tables_SB.shape[1] * latents.shape[1]
        table = launch_table(architecture(q_TNW.device))
        splits = decode_splits(table, num_seqs * row_blocks, longest, tile.block_n)
    make = q_TNW.new_empty if uniform or max_query_len > 1 else q_TNW.new_zeros  # no launch looks at what pads q
    call = _Call(
        make((num_tokens, num_heads, rank)), q_TNW, latents, block_tables_SB, query_start_loc_S1, seq_lens_S,
        scale * stored_scale * LOG2_E, stored_scale,
    )  # fmt: skip
    if num_tokens == 0:
        return call.out_TNR
    if max_query_len > 1:
        long = latent_tile(num_heads * max_query_len, q_TNW.dtype, latents.dtype, native_fp8=native)
        blocks = num_tokens * num_heads // long.block_m + num_seqs + 1
        _run(call, long, (blocks, 1), short_len=1 if num_seqs > 1 else 0)
        if num_seqs == 1:
            return call.out_TNR
    _run_short(call, tile, num_seqs * row_blocks, splits, uniform=uniform)
    return call.out_TNR


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What all launches of one call take."""

    out_TNR: torch.Tensor
    q_TNW: torch.Tensor
    latents: torch.Tensor
    block_tables_SB: torch.Tensor
    query_start_loc_S1: torch.Tensor
    seq_lens_S: torch.Tensor
    score_scale: float
    value_scale: float


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Room for sums over parts of each sequence's context, to be merged."""

    sums_SNPR: torch.Tensor
    """float32; not written where a part holds no key."""
    log_sums_SNP: torch.Tensor
    """float32, base 2."""


def _run_short(call: _Call, tile: LatentTile, num_programs: int, splits: Splits, *, uniform: bool) -> None:
    """Sequences of one query: in parts that are then merged, if there are several."""
    num_heads, rank, num_seqs = call.q_TNW.shape[1], call.out_TNR.shape[2], call.seq_lens_S.shape[0]
    if splits.parts == 1:
        _run(call, tile, (num_programs, 1), is_short=True, uniform=uniform)
        return
    make = call.q_TNW.new_empty
    parts = _Parts(
        make((num_seqs, num_heads, splits.parts, rank), dtype=torch.float32),
        make((num_seqs, num_heads, splits.parts), dtype=torch.float32),
    )
    _run(call, tile, (num_programs, splits.parts), is_short=True, uniform=uniform, splits=splits, parts=parts)
    merge_parts_kernel[(num_seqs, num_heads)](
        call.out_TNR,
        parts.sums_SNPR,
        parts.log_sums_SNP,
        call.query_start_loc_S1,
        splits.parts,
        HEADS=num_heads,
        HEAD_DIM=rank,
        DIM_PADDED=max(MIN_DOT_SIDE, next_power_of_2(rank)),
        BLOCK_P=min(MERGED_AT_ONCE, splits.parts),
        BLOCK_Q=1,
        BY_TOKEN=uniform,
        **early_launch(call.out_TNR.device),
        **COMPILE_OPTIONS,
    )


def _run(
    call: _Call,
    tile: LatentTile,
    grid: tuple[int, int],
    *,
    is_short: bool = False,
    uniform: bool = False,
    short_len: int = 0,
    splits: Splits = WHOLE,
    parts: _Parts | None = None,
) -> None:
    num_tokens, num_heads, width = call.q_TNW.shape
    rank, latents = call.out_TNR.shape[2], as_bytes(call.latents)
    _latent_attention_kernel[grid](
        call.out_TNR,
        call.out_TNR if parts is None else parts.sums_SNPR,
        call.out_TNR if parts is None else parts.log_sums_SNP,
        call.q_TNW,
        latents,
        call.block_tables_SB,
        call.query_start_loc_S1,
        call.seq_lens_S,
        call.seq_lens_S.shape[0],
        num_tokens,
        short_len,
        splits.min_keys,
        call.score_scale,
        call.value_scale,
        call.q_TNW.stride(0),
        call.q_TNW.stride(1),
        call.block_tables_SB.stride(0),
        latents.stride(0),
        latents.stride(1),
        HEADS=num_heads,
        RANK=rank,
        RANK_PADDED=max(MIN_DOT_SIDE, next_power_of_2(rank)),
        ROTATED=width - rank,
        ROTATED_PADDED=max(MIN_DOT_SIDE, next_power_of_2(width - rank)),
        BLOCK_SIZE=latents.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SHORT=is_short,
        UNIFORM=uniform,
        IN_PARTS=parts is not None,
        FP8=fp8_form(call.latents.dtype),
        NATIVE_FP8=has_native_fp8(call.q_TNW.device),
        UPCAST=needs_upcast(call.q_TNW.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **COMPILE_OPTIONS,
    )


def _check(q: torch.Tensor, latents: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor, rank: int) -> None:
    width = latents.shape[-1]
    if q.dim() != 3 or latents.dim() != 3 or q.shape[2] != width or not 0 < rank < width:
        raise UnsupportedShapeError(
            f"queries {list(q.shape)} must be as wide as latents {list(latents.shape)}, and a rank of {rank} less"
        )
    if rank > MAX_RANK:
        raise UnsupportedShapeError(f"latents of rank {rank} are not supported: up to {MAX_RANK} are")
    if latents.dtype not in KV_DTYPES or q.stride(2) != 1 or latents.stride(2) != 1:
        raise UnsupportedShapeError("latents must be of a type of KV pools, and the last axes be contiguous")
    if tables.shape[:1] != seq_lens.shape or tables.stride(1) != 1:
        raise UnsupportedShapeError(f"block tables {list(tables.shape)} do not fit {list(seq_lens.shape)} sequences")


@jit()
def _find_sequence(query_start_loc_ptr, block, num_seqs, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the sequence that a block of rows belongs to, by binary search; `num_seqs` for what pads q.

    Sequence s owns the blocks from query_start_loc[s] * HEADS // BLOCK_M + s on.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) * HEADS // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _attend_tiles(  # type: ignore[no-untyped-def]
    q_MR,
    q_MQ,
    acc_MR,
    row_max_M,
    row_sum_M,
    position_M,
    begin,
    end,
    table_ptr,
    latents_ptr,
    stride_block,
    stride_slot,
    score_scale,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys from `begin`, which starts a tile, to `end`; MASKED: some row may not see some of them.

    The sums are as those of `paged_softmax.attend_tiles`.
    """
    zeros_MK = tl.zeros([q_MR.shape[0], BLOCK_N], tl.float32)
    next_pages = load_pages(table_ptr, begin, 0, end, BLOCK_SIZE, BLOCK_N)
    for tile_start in range(begin, end, BLOCK_N):
        pages = next_pages
        next_pages = load_pages(table_ptr, tile_start + BLOCK_N, 0, end, BLOCK_SIZE, BLOCK_N)
        key_K = tile_start + tl.arange(0, BLOCK_N)
        in_range_K = key_K < end
        offset_K = page_offsets(pages, tile_start, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N)
        latent_KR = load_tile(latents_ptr, offset_K, in_range_K, RANK, q_MR.shape[1], MASKED)
        latent_KR = as_operand(latent_KR, q_MR.dtype, FP8, NATIVE_FP8)
        rotated_KQ = load_tile(latents_ptr + RANK, offset_K, in_range_K, ROTATED, q_MQ.shape[1], MASKED)
        rotated_KQ = as_operand(rotated_KQ, q_MR.dtype, FP8, NATIVE_FP8)
        scores_MK = dot(q_MQ, tl.trans(rotated_KQ), zeros_MK, UPCAST)
        scores_MK = dot(q_MR, tl.trans(latent_KR), scores_MK, UPCAST)
        if MASKED:
            visible_MK = in_range_K[None, :] & (key_K[None, :] <= position_M[:, None])
            scores_MK = tl.where(visible_MK, scores_MK, float("-inf"))
        new_max_M = tl.maximum(row_max_M, tl.max(scores_MK, axis=1) * score_scale)
        base_M = new_max_M
        if MASKED:
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(row_max_M - base_M)
        weights_MK = tl.exp2(scores_MK * score_scale - base_M[:, None])
        row_sum_M = row_sum_M * rescale_M + tl.sum(weights_MK, axis=1)
        row_max_M = new_max_M
        acc_MR = dot(weights_MK.to(q_MR.dtype), latent_KR, acc_MR * rescale_M[:, None], UPCAST)
    return acc_MR, row_max_M, row_sum_M


@jit(do_not_specialize=("num_seqs", "num_tokens", "short_len", "min_keys"))
def _latent_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sum_ptr,
    q_ptr,
    latents_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_seqs,
    num_tokens,
    short_len,
    min_keys,
    score_scale,
    value_scale,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_block,
    stride_slot,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTATED_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    UNIFORM: tl.constexpr,
    IN_PARTS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One program per BLOCK_M rows and part of the context. SHORT: sequences of one query; else those of more than
    `short_len`, and what pads q."""
    if SHORT:
        row_blocks: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        seq = tl.program_id(0) // row_blocks
        first_row = (tl.program_id(0) % row_blocks) * BLOCK_M
        seq_len = tl.load(seq_lens_ptr + seq)
        if UNIFORM:
            query_start = seq
            query_len = 1
        else:
            query_start = tl.load(query_start_loc_ptr + seq)
            query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
            query_len = tl.where(query_len == 1, query_len, 0)
    else:
        # the last blocks of a prompt see the longest contexts: they start first
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = _find_sequence(query_start_loc_ptr, block, num_seqs, HEADS, BLOCK_M)
        real = seq < num_seqs
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1, mask=real, other=num_tokens) - query_start
        seq_len = tl.load(seq_lens_ptr + seq, mask=real, other=0)
        first_row = (block - query_start * HEADS // BLOCK_M - seq) * BLOCK_M
        query_len = tl.where(real & (query_len <= short_len), 0, query_len)
    if first_row >= query_len * HEADS:
        return

    row_M = first_row + tl.arange(0, BLOCK_M)
    query_M = row_M // HEADS
    head_M = row_M % HEADS
    in_rows_M = query_M < query_len
    token_M = (query_start + query_M).to(tl.int64)
    position_M = seq_len - query_len + query_M
    first_position = seq_len - query_len + first_row // HEADS
    last_query = tl.minimum((first_row + BLOCK_M - 1) // HEADS, query_len - 1)
    end = tl.maximum(seq_len - query_len + last_query + 1, 0)
    end = tl.where(seq_len > 0, end, 0)
    begin = 0
    if IN_PARTS:
        keys = tl.maximum((end + tl.num_programs(1) - 1) // tl.num_programs(1), min_keys)
        keys = (keys + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        begin = tl.program_id(1) * keys
        end = tl.minimum(begin + keys, end)

    rank_R = tl.arange(0, RANK_PADDED)
    rotated_Q = tl.arange(0, ROTATED_PADDED)
    q_row_M = q_ptr + token_M * stride_q_token + head_M * stride_q_head
    q_MR = tl.load(q_row_M[:, None] + rank_R[None, :], mask=in_rows_M[:, None] & (rank_R < RANK)[None, :], other=0.0)
    q_MQ = tl.load(
        q_row_M[:, None] + RANK + rotated_Q[None, :],
        mask=in_rows_M[:, None] & (rotated_Q < ROTATED)[None, :],
        other=0.0,
    )
    acc_MR = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)
    row_max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum_M = tl.zeros([BLOCK_M], tl.float32)
    # every row sees the tiles up to here whole
    full_end = tl.minimum(first_position + 1, end)
    full_end = tl.maximum(begin + (full_end - begin) // BLOCK_N * BLOCK_N, begin)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    acc_MR, row_max_M, row_sum_M = _attend_tiles(
        q_MR, q_MQ, acc_MR, row_max_M, row_sum_M, position_M, begin, full_end, table_ptr, latents_ptr,
        stride_block, stride_slot, score_scale,
        RANK, ROTATED, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, UPCAST, False,
    )  # fmt: skip
    acc_MR, row_max_M, row_sum_M = _attend_tiles(
        q_MR, q_MQ, acc_MR, row_max_M, row_sum_M, position_M, full_end, end, table_ptr, latents_ptr,
        stride_block, stride_slot, score_scale,
        RANK, ROTATED, BLOCK_SIZE, BLOCK_N, FP8, NATIVE_FP8, UPCAST, True,
    )  # fmt: skip

    seen_M = row_sum_M > 0
    divisor_M = tl.where(seen_M, row_sum_M, 1.0)
    out_MR = acc_MR * (value_scale / divisor_M)[:, None]
    mask_MR = in_rows_M[:, None] & (rank_R < RANK)[None, :]
    if IN_PARTS:
        part_row_M = (seq.to(tl.int64) * HEADS + head_M) * tl.num_programs(1) + tl.program_id(1)
        log_sum_M = tl.where(seen_M, row_max_M + tl.log2(divisor_M), float("-inf"))
        tl.store(log_sum_ptr + part_row_M, log_sum_M, mask=in_rows_M)
        tl.store(part_ptr + part_row_M[:, None] * RANK + rank_R[None, :], out_MR, mask=mask_MR & seen_M[:, None])
    else:
        out_row_M = (token_M * HEADS + head_M) * RANK
        tl.store(out_ptr + out_row_M[:, None] + rank_R[None, :], out_MR.to(out_ptr.dtype.element_ty), mask=mask_MR)
