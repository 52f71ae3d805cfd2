"""The two kernels of attention: one for any batch and any part of the context, and the one that merges the parts.

Shapes: T query tokens, S sequences, N query heads, K key heads, G = N / K, H head dim, B blocks per table, P parts.
Grids depend on shapes alone, so nothing waits for the device and one CUDA graph serves all lengths. After Dao, arXiv
2307.08691, and the split-KV decoding of Dao et al., pytorch.org/blog/flash-decoding.
"""

from __future__ import annotations

from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.early_launch import wait_for_inputs
from pagefleet_kernels.paged_softmax import attend_tiles

# Which queries a launch serves (ROWS). Plain numbers, because a kernel's constants are.
LONG = 0  # sequences of more than `short_len` queries, in blocks of BLOCK_Q found by binary search; and what pads q
SHORT = 1  # sequences of up to BLOCK_Q queries, one program each
SHARED = 2  # every token, as if all were of one sequence, against the prefix that all of them see whole


@jit()
def _find_sequence(query_start_loc_ptr, query_block, num_seqs, BLOCK_Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the sequence that a block of queries belongs to, by binary search; `num_seqs` for what pads q.

    Sequence s owns the blocks from query_start_loc[s] // BLOCK_Q + s on: enough for its queries however the divisions
    round, and at most one too many, which finds nothing to do.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _find_queries(  # type: ignore[no-untyped-def]
    query_start_loc_ptr,
    seq_lens_ptr,
    num_seqs,
    num_tokens,
    prefix_len,
    short_len,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """This program's sequence, that one's first token, numbers of queries and keys, and the first query of the block.

    The number of queries is 0 where another launch serves the sequence.
    """
    block = tl.program_id(0)
    # the last blocks of a prompt see the longest contexts: they start first
    seq = block if ROWS != 0 else tl.num_programs(0) - 1 - block
    first_query = block * 0
    query_start = block * 0
    if ROWS == 2:
        seq = block * 0
        query_len = num_tokens
        seq_len = prefix_len
        first_query = block * BLOCK_Q
    elif ROWS == 1:
        seq_len = tl.load(seq_lens_ptr + seq)
        if UNIFORM:
            query_start = seq
            query_len = 1
        else:
            query_start = tl.load(query_start_loc_ptr + seq)
            query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
            query_len = tl.where(query_len <= BLOCK_Q, query_len, 0)
    else:
        block = seq
        seq = _find_sequence(query_start_loc_ptr, block, num_seqs, BLOCK_Q)
        real = seq < num_seqs
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1, mask=real, other=num_tokens) - query_start
        seq_len = tl.load(seq_lens_ptr + seq, mask=real, other=0)
        first_query = (block - query_start // BLOCK_Q - seq) * BLOCK_Q
        query_len = tl.where(real & (query_len <= short_len), 0, query_len)
    return seq, query_start, query_len, seq_len, first_query


@jit()
def _first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """First key that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@jit()
def _find_keys(  # type: ignore[no-untyped-def]
    first_position,
    seq_len,
    prefix_len,
    part,
    min_keys,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What a block of queries from `first_position` on sees in this part of the context.

    Some row sees each key from `low` to `high`. The tiles go from `begin` to `end`; every row sees those from
    `lead_end` to `full_end` whole.
    """
    if ROWS == 2:
        low = first_position * 0
        high = prefix_len
        origin = low
        lead_end = low
        full_end = prefix_len // BLOCK_N * BLOCK_N
    else:
        last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
        low = tl.maximum(_first_visible(first_position, WINDOW, CHUNK), prefix_len)
        high = last_position + 1
        origin = prefix_len
        lead_end = tl.cdiv(_first_visible(last_position, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
        full_end = origin + tl.maximum(first_position + 1 - origin, 0) // BLOCK_N * BLOCK_N
    # tiles begin where pages do
    begin = origin + (low - origin) // BLOCK_N * BLOCK_N
    end = tl.maximum(high, begin)
    if IN_PARTS:
        part_len = tl.maximum(tl.cdiv(tl.cdiv(end - begin, BLOCK_N), tl.num_programs(2)), min_keys // BLOCK_N) * BLOCK_N
        begin += part * part_len
        end = tl.minimum(begin + part_len, end)
    lead_end = tl.maximum(tl.minimum(lead_end, end), begin)
    full_end = tl.maximum(tl.minimum(full_end, end), lead_end)
    return low, high, begin, lead_end, full_end, end


@jit()
def _start_rows(  # type: ignore[no-untyped-def]
    sinks_ptr, slopes_ptr, head_M, in_rows_M, part, SINKS: tl.constexpr, ALIBI: tl.constexpr
):
    """ALiBi slopes [M], and the maximal score [M] and sum of weights [M] of rows that have seen no key.

    Both in base 2. A sink counts once, in the first part.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    slope_M = tl.zeros(head_M.shape, tl.float32)
    row_max_M = tl.full(head_M.shape, float("-inf"), tl.float32)
    row_sum_M = slope_M
    if ALIBI:
        slope_M = tl.load(slopes_ptr + head_M, mask=in_rows_M, other=0.0) * LOG2_E
    if SINKS:
        sink_M = tl.load(sinks_ptr + head_M, mask=in_rows_M, other=0.0) * LOG2_E
        row_max_M = tl.where(part == 0, sink_M, row_max_M)
        row_sum_M = tl.where(part == 0, 1.0, row_sum_M)
    return slope_M, row_max_M, row_sum_M


@jit(
    do_not_specialize=(
        "num_seqs",
        "num_tokens",
        "prefix_len",
        "short_len",
        "min_keys",
        "first_part",
        "num_parts",
        "stride_table",
    )
)
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sum_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    num_seqs,
    num_tokens,
    prefix_len,
    short_len,
    min_keys,
    first_part,
    num_parts,
    score_scale,
    softcap,
    value_scale,
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
    ROWS: tl.constexpr,
    UNIFORM: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PARTS_BY_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per block of queries, key head and part of the context; rows are (query, head of the group) pairs.

    Writes the output itself, or IN_PARTS one part of it of `num_parts`, [.., N, P, H], with the logarithm of its sum of
    weights; the launch's own begin at `first_part`. How many parts there are is no constant: each number would be
    compiled anew. SHARED rows see the keys before `prefix_len`, others those after it.
    """
    SEES_ALL: tl.constexpr = ROWS == 2
    wait_for_inputs(EARLY)
    seq, query_start, query_len, seq_len, first_query = _find_queries(
        query_start_loc_ptr, seq_lens_ptr, num_seqs, num_tokens, prefix_len, short_len, BLOCK_Q, ROWS, UNIFORM
    )
    if first_query >= query_len:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    seq = seq.to(tl.int64)

    first_position = seq_len - query_len + first_query
    low, high, begin, lead_end, full_end, end = _find_keys(
        first_position, seq_len, prefix_len, part, min_keys, BLOCK_Q, BLOCK_N, ROWS, IN_PARTS, WINDOW, CHUNK
    )

    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    in_rows_M = (row_M < BLOCK_Q * GROUP) & (query_M < query_len)
    token_M = (query_start + query_M).to(tl.int64)
    part_row_M = token_M if PARTS_BY_TOKEN else seq * BLOCK_Q + query_M
    part_row_M = (part_row_M * HEADS + head_M) * num_parts + first_part + part
    if IN_PARTS:  # noqa: SIM102 -- one is known when compiling, the other is not
        if (begin >= end) & (part > 0):
            tl.store(log_sum_ptr + part_row_M, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=in_rows_M)
            return

    dim_D = tl.arange(0, DIM_PADDED)
    mask_MD = in_rows_M[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_offset_M = token_M * stride_q_token + head_M * stride_q_head
    q_MD = tl.load(q_ptr + q_offset_M[:, None] + dim_D[None, :], mask=mask_MD, other=0.0)
    slope_M, row_max_M, row_sum_M = _start_rows(
        sinks_ptr, slopes_ptr, head_M, in_rows_M, part, SINKS and not SEES_ALL, ALIBI
    )
    acc_MD = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    for stage in tl.static_range(3):
        if stage > 0 or WINDOW > 0 or CHUNK > 0:
            acc_MD, row_max_M, row_sum_M = attend_tiles(
                q_MD,
                acc_MD,
                row_max_M,
                row_sum_M,
                first_position + row_M // GROUP,
                slope_M,
                begin if stage == 0 else lead_end if stage == 1 else full_end,
                lead_end if stage == 0 else full_end if stage == 1 else end,
                low,
                high,
                block_tables_ptr + seq * stride_table,
                key_ptr + kv_head * stride_head,
                value_ptr + kv_head * stride_head,
                stride_block,
                stride_slot,
                score_scale,
                softcap,
                HEAD_DIM,
                BLOCK_SIZE,
                BLOCK_N,
                WINDOW,
                CHUNK,
                SOFTCAP,
                ALIBI,
                not SEES_ALL,
                FP8,
                NATIVE_FP8,
                UPCAST,
                stage != 1,
            )

    seen_M = row_sum_M > 0
    divisor_M = tl.where(seen_M, row_sum_M, 1.0)
    out_MD = acc_MD * (value_scale / divisor_M)[:, None]
    if not IN_PARTS:
        out_row_M = (token_M * HEADS + head_M) * HEAD_DIM
        tl.store(out_ptr + out_row_M[:, None] + dim_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)
    else:
        log_sum_M = tl.where(seen_M, row_max_M + tl.log2(divisor_M), float("-inf"))
        if not SEES_ALL:
            # an empty sequence comes out as zeros: this outweighs what its padding saw of a shared prefix
            log_sum_M = tl.where(seq_len > 0, log_sum_M, 1e30)
        tl.store(part_ptr + part_row_M[:, None] * HEAD_DIM + dim_D[None, :], out_MD, mask=mask_MD)
        tl.store(log_sum_ptr + part_row_M, log_sum_M, mask=in_rows_M)


@jit()
def _log_sums(log_sum_ptr, first_row, start, num_parts, BLOCK_P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the parts from `start` on; -inf beyond the last."""
    part_P = start + tl.arange(0, BLOCK_P)
    return tl.load(log_sum_ptr + first_row + part_P, mask=part_P < num_parts, other=float("-inf"))


@jit(do_not_specialize=("num_parts",))
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    part_ptr,
    log_sum_ptr,
    query_start_loc_ptr,
    num_parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per row and head: the mean of the parts, weighted by their sums of weights.

    BY_TOKEN: rows are tokens. Otherwise row s * BLOCK_Q + j is query j of sequence s, if that one was SHORT.
    """
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    token = row
    if not BY_TOKEN:
        seq = row // BLOCK_Q
        query = row % BLOCK_Q
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
        if (query >= query_len) | (query_len > BLOCK_Q):
            return
        token = query_start + query
    head = tl.program_id(1)
    dim_D = tl.arange(0, DIM_PADDED)
    mask_D = dim_D < HEAD_DIM
    first_row = (row.to(tl.int64) * HEADS + head) * num_parts
    largest = tl.max(_log_sums(log_sum_ptr, first_row, 0, num_parts, BLOCK_P), axis=0)
    for start in range(BLOCK_P, num_parts, BLOCK_P):
        largest = tl.maximum(largest, tl.max(_log_sums(log_sum_ptr, first_row, start, num_parts, BLOCK_P), axis=0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = base * 0.0
    sum_D = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        log_sum_P = _log_sums(log_sum_ptr, first_row, start, num_parts, BLOCK_P)
        weight_P = tl.exp2(log_sum_P - base)
        total += tl.sum(weight_P, axis=0)
        offset_PD = (first_row + start + tl.arange(0, BLOCK_P))[:, None] * HEAD_DIM + dim_D[None, :]
        # parts without a key were not written
        seen_P = log_sum_P > float("-inf")
        parts_PD = tl.load(part_ptr + offset_PD, mask=seen_P[:, None] & mask_D[None, :], other=0.0)
        sum_D += tl.sum(parts_PD * weight_P[:, None], axis=0)
    out_D = sum_D / tl.where(total > 0, total, 1.0)
    out_row = (token.to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_row + dim_D, out_D.to(out_ptr.dtype.element_ty), mask=mask_D)
