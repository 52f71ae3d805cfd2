"""Attention that comes rounded to eight bits for the product that follows, where that costs no launch of its own.

The parts of a context are merged anyway: one program that merges all heads of a token can round them together.
Shapes: T query tokens, S sequences, N query heads, H head dim, B blocks per table, P parts.
"""

from __future__ import annotations

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.attention_launch import Launch, PagedQueries, Parts, run
from pagefleet_kernels.decode_attention import short_queries
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.fp8 import as_bytes
from pagefleet_kernels.quantize import SMALLEST_SCALE, Quantized, QuantizeSpec, quantize_constants, quantize_rows
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import padded_head_dim, tile_warps

MAX_ROW = 16384
"""Elements of a token over all heads that one program holds to round them together."""
MAX_PART_BYTES = 512 << 10
"""Parts of a token that one program may read alone: by estimate as long as the launch takes that this saves."""


def rounded_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    max_query_len: int,
    spec: QuantizeSpec,
    *,
    backend: Backend | None = None,
) -> Quantized | None:
    """Attention over the pages as `paged_attention`'s, rounded as `spec` says: numbers [T, N * H] and their scales.

    None where no kernel merges parts, or none could hold a token's: attend and round one after the other then.
    """
    is_decode = max_query_len == 1 and q_TNH.shape[0] == seq_lens_S.shape[0]
    starts = None if is_decode else query_start_loc_S1
    queries = PagedQueries(q_TNH, kv_cache, block_tables_SB, starts, seq_lens_S)
    queries.check(rule)
    if choose_backend(q_TNH.device, backend) == "torch" or queries.num_seqs == 0:
        return None
    launch = short_queries(queries, rule)
    if max_query_len > launch.block_q or not _pays(launch, queries, spec):
        return None
    return _run(launch, queries, rule, spec)


def _pays(launch: Launch, queries: PagedQueries, spec: QuantizeSpec) -> bool:
    """Whether there are parts, heads fill their tiles, and a program can hold a token."""
    _, num_heads, head_dim = queries.q_TNH.shape
    parts, row = launch.splits.parts, next_power_of_2(num_heads) * head_dim
    return (
        parts > 1
        and padded_head_dim(head_dim) == head_dim
        and (spec.group or 1) <= row <= MAX_ROW
        and parts * num_heads * head_dim * 4 <= MAX_PART_BYTES
    )


def _run(launch: Launch, queries: PagedQueries, rule: ScoreRule, spec: QuantizeSpec) -> Quantized:
    num_tokens, num_heads, head_dim = queries.q_TNH.shape
    width, device, starts = num_heads * head_dim, queries.q_TNH.device, queries.query_start_loc_S1
    values = torch.empty((num_tokens, width), dtype=spec.dtype, device=device)
    scale = spec.scale_for(num_tokens, width, device)
    if starts is not None:  # no launch looks at what pads q
        values.zero_()
        if spec.scales_rows:
            scale.fill_(SMALLEST_SCALE)
    num_rows, heads_padded = queries.num_seqs * launch.block_q, next_power_of_2(num_heads)
    parts = Parts.allocate(queries, num_rows, launch.splits.parts, by_token=False)
    run(launch, queries.q_TNH, queries, rule, parts)
    _merge_rounded_kernel[(num_rows,)](
        as_bytes(values),
        scale,
        scale if spec.static_scale is None else spec.static_scale,
        parts.values_RNPH,
        parts.log_sums_RNP,
        queries.seq_lens_S if starts is None else starts,
        launch.splits.parts,
        num_tokens,
        HEADS=num_heads,
        HEADS_PADDED=heads_padded,
        HEAD_DIM=head_dim,
        BLOCK_Q=launch.block_q,
        BY_TOKEN=starts is None,
        num_warps=tile_warps(heads_padded * head_dim),
        **quantize_constants(spec, device),
        **COMPILE_OPTIONS,
    )
    return Quantized(values, scale)


@jit(do_not_specialize=("num_parts", "num_tokens"))
def _merge_rounded_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    scale_ptr,
    static_ptr,
    part_ptr,
    log_sum_ptr,
    query_start_loc_ptr,
    num_parts,
    num_tokens,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As `merge_parts_kernel`, one program for all heads of a row, whose mean it rounds as `quantize_rows` does."""
    row = tl.program_id(0)
    token = row
    if not BY_TOKEN:
        seq = row // BLOCK_Q
        query_start = tl.load(query_start_loc_ptr + seq)
        query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
        if (row % BLOCK_Q >= query_len) | (query_len > BLOCK_Q):
            return
        token = query_start + row % BLOCK_Q
    head_N = tl.arange(0, HEADS_PADDED)
    dim_D = tl.arange(0, HEAD_DIM)
    first_N = (row.to(tl.int64) * HEADS + head_N) * num_parts
    largest_N = tl.full([HEADS_PADDED], float("-inf"), tl.float32)
    total_N = tl.zeros([HEADS_PADDED], tl.float32)
    sum_ND = tl.zeros([HEADS_PADDED, HEAD_DIM], tl.float32)
    for part in range(0, num_parts):
        log_sum_N = tl.load(log_sum_ptr + first_N + part, mask=head_N < HEADS, other=float("-inf"))
        seen_N = log_sum_N > float("-inf")  # parts without a key were not written
        new_N = tl.maximum(largest_N, log_sum_N)
        base_N = tl.where(new_N == float("-inf"), 0.0, new_N)
        rescale_N = tl.exp2(largest_N - base_N)
        weight_N = tl.exp2(log_sum_N - base_N)
        offset_ND = (first_N + part)[:, None] * HEAD_DIM + dim_D[None, :]
        part_ND = tl.load(part_ptr + offset_ND, mask=seen_N[:, None], other=0.0)
        sum_ND = sum_ND * rescale_N[:, None] + part_ND * weight_N[:, None]
        total_N = total_N * rescale_N + weight_N
        largest_N = new_N
    out_ND = sum_ND / tl.where(total_N > 0, total_N, 1.0)[:, None]
    x = tl.reshape(out_ND, (1, HEADS_PADDED * HEAD_DIM))
    column = tl.arange(0, HEADS_PADDED * HEAD_DIM)
    token_1 = token.to(tl.int64) + tl.arange(0, 1)
    quantize_rows(
        values_ptr, scale_ptr, static_ptr, x, token_1, column, num_tokens, HEADS * HEAD_DIM, GROUP, STATIC, FP8, NATIVE
    )
