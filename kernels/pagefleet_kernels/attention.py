"""Causal attention over the paged pool, for any batch: whole prompts, chunks of them, decodes, or all in one.

Shapes: T query tokens of all sequences, S sequences, N query heads, K key heads, G = N / K, H head dim, B blocks per
table. Nothing waits for the device, and launches depend on shapes alone.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_attention
from pagefleet_kernels.attention_launch import PagedQueries, long_launch, run, run_short
from pagefleet_kernels.decode_attention import decode_attention, short_queries
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import AttentionTile, attention_tile, launch_table


def varlen_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    max_query_len: int,
    *,
    tile: AttentionTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [T, N, H] of queries whose keys and values are already in the pages.

    The queries of sequence s are rows query_start_loc[s] to query_start_loc[s + 1] of q; query j of them is at position
    `seq_lens[s] - query_len + j` and sees the keys up to there, or fewer: see `ScoreRule` for that and for what changes
    the scores. `seq_lens` counts all keys, these tokens included. `max_query_len` bounds the query lengths (host side,
    no wait). Query head n reads key head n // G. Table entries that no query sees are never used. A sequence of length
    0 and rows past query_start_loc[S] (padding of a graph) give zeros. Index tensors are int32 or int64; `kv_cache` may
    be in float8_e4m3fn. `tile` overrides the table of launches for sequences of many queries.
    """
    queries = PagedQueries(q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S)
    queries.check(rule)
    if choose_backend(q_TNH.device, backend) == "torch":
        return reference_attention.varlen_attention(
            q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S, rule, max_query_len
        )
    return attend_long_and_short(queries, rule, max_query_len, tile)


def attend_long_and_short(
    queries: PagedQueries, rule: ScoreRule, max_query_len: int, tile: AttentionTile | None = None
) -> torch.Tensor:
    """Sequences of few queries go to split contexts, the others to tall tiles; which is which the device finds out."""
    q_TNH = queries.q_TNH
    short = short_queries(queries, rule)
    if max_query_len <= short.block_q:
        # no launch looks at what pads q
        out_TNH = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        run_short(short, out_TNH, queries, rule)
        return out_TNH
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if tile is None:
        table = launch_table(architecture(q_TNH.device))
        tile = attention_tile(table.prefill, q_TNH.shape[2], q_TNH.dtype, queries.kv_cache.dtype)
    mixed = queries.num_seqs > 1
    long = long_launch(queries, tile, max_query_len, short_len=short.block_q if mixed else 0)
    run(long, out_TNH, queries, rule)
    if mixed:
        run_short(short, out_TNH, queries, rule)
    return out_TNH


def paged_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    max_query_len: int,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [T, N, H]; arguments as of `varlen_attention`.

    A batch of one query for each sequence goes to `decode_attention`. In a batch padded for a graph, give padding
    sequences a length of 0 and one padding token each, and it still does.
    """
    if max_query_len == 1 and q_TNH.shape[0] == seq_lens_S.shape[0]:
        return decode_attention(q_TNH, kv_cache, block_tables_SB, seq_lens_S, rule, backend=backend)
    return varlen_attention(
        q_TNH, kv_cache, block_tables_SB, query_start_loc_S1, seq_lens_S, rule, max_query_len, backend=backend
    )
