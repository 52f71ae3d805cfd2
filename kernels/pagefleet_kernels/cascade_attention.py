"""Attention where all sequences begin with the same blocks: those are attended once, by all queries together.

Read sequence by sequence, a shared prefix is loaded once per sequence; here once per tile of queries. The prefix is cut
into parts, so that a long one fills the device even with few queries, and each sequence's own keys are further parts:
one merge by their sums of weights ends it. After Juravsky et al. (Hydragen), arXiv 2402.05099.

Shapes: T query tokens of all sequences, S sequences, N query heads, H head dim, B blocks per table.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagefleet_kernels import reference_attention
from pagefleet_kernels.attention import attend_long_and_short
from pagefleet_kernels.attention_kernel import SHARED
from pagefleet_kernels.attention_launch import Launch, PagedQueries, Parts, long_launch, merge, run
from pagefleet_kernels.decode_attention import short_queries
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import LaunchTable, attention_tile, decode_splits, launch_table

MAX_PART_BYTES = 256 << 20
"""Parts of a batch that would take more are not worth it: with that many queries the products are the limit."""


def cascade_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    max_query_len: int,
    num_common_blocks: int,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [T, N, H]; arguments and result as of `varlen_attention`, up to rounding.

    The first `num_common_blocks` entries of all block tables are the same, and every query (padding apart) stands past
    them. Where queries do not see the prefix whole or alike (a window, chunks, ALiBi), where there is no
    prefix, and where there are too many queries to gain by it, this is `varlen_attention`.
    """
    queries = PagedQueries(q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S)
    queries.check(rule)
    if not 0 <= num_common_blocks <= block_tables_SB.shape[1]:
        raise UnsupportedShapeError(
            f"num_common_blocks must be 0 to {block_tables_SB.shape[1]}, the width of the block tables, "
            f"not {num_common_blocks}"
        )
    if choose_backend(q_TNH.device, backend) == "torch":
        return reference_attention.varlen_attention(
            q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S, rule, max_query_len
        )
    table = launch_table(architecture(q_TNH.device))
    prefix_len = num_common_blocks * kv_cache.shape[3]
    own = short_queries(queries, rule, prefix_len=prefix_len)
    shared = _shared_launch(queries, table, prefix_len)
    num_parts = shared.splits.parts + own.splits.parts
    pays = Parts.num_bytes(queries, q_TNH.shape[0], num_parts) <= MAX_PART_BYTES
    if prefix_len == 0 or queries.num_seqs < 2 or rule.local or rule.alibi_slopes_N is not None or not pays:
        return attend_long_and_short(queries, rule, max_query_len)
    return _launch(queries, rule, max_query_len, shared, own)


def _shared_launch(queries: PagedQueries, table: LaunchTable, prefix_len: int) -> Launch:
    """All tokens against the prefix, in as many parts as fill the device."""
    num_tokens, _, head_dim = queries.q_TNH.shape
    tile = attention_tile(table.prefill, head_dim, queries.q_TNH.dtype, queries.kv_cache.dtype)
    whole = long_launch(queries, tile, max(num_tokens, 1))
    launch = replace(whole, rows=SHARED, prefix_len=prefix_len)
    blocks, heads, _ = launch.grid(queries)
    return replace(launch, splits=decode_splits(table, blocks * heads, prefix_len, tile.block_n))


def _launch(queries: PagedQueries, rule: ScoreRule, max_query_len: int, shared: Launch, own: Launch) -> torch.Tensor:
    """The prefix, the rest of each context, and the merge; parts are rows of tokens."""
    q_TNH = queries.q_TNH
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    parts = Parts.allocate(queries, q_TNH.shape[0], shared.splits.parts + own.splits.parts, by_token=True)
    run(shared, out_TNH, queries, rule, parts)
    own = replace(own, first_part=shared.splits.parts)
    if max_query_len > 1 or q_TNH.shape[0] != queries.num_seqs:
        # sequences of many queries have one part of their own, and what pads q has none
        parts.log_sums_RNP[:, :, shared.splits.parts + 1 :] = float("-inf")
        table = launch_table(architecture(q_TNH.device))
        tile = attention_tile(table.prefill, q_TNH.shape[2], q_TNH.dtype, queries.kv_cache.dtype)
        long = long_launch(queries, tile, max_query_len, short_len=own.block_q, prefix_len=own.prefix_len)
        run(replace(long, first_part=shared.splits.parts), out_TNH, queries, rule, parts)
    run(own, out_TNH, queries, rule, parts)
    merge(parts, out_TNH, queries)
    return out_TNH
