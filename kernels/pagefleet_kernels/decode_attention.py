"""Attention of one query per sequence over the paged pool, each context cut into parts that run side by side.

Shapes: S sequences, N query heads, K key heads, G = N / K, H head dim, B blocks per table.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_attention
from pagefleet_kernels.attention_launch import Launch, PagedQueries, run_short, short_launch
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.score_rule import ScoreRule
from pagefleet_kernels.tuning import AttentionTile, Splits, attention_tile, decode_splits, launch_table


def decode_attention(
    q_SNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    *,
    num_splits: int | Splits | None = None,
    tile: AttentionTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention output [S, N, H] of each sequence's last token, whose key and value are already in the pages.

    `seq_lens` counts that token; a length of 0 (padding of a graph) gives zeros. `num_splits` (a power of two) fixes
    the number of parts, which otherwise follows the batch size and so changes the rounding between batches; `tile`
    overrides the table of launches.
    """
    queries = PagedQueries(q_SNH, kv_cache, block_tables_SB, None, seq_lens_S)
    queries.check(rule)
    splits = Splits(num_splits) if isinstance(num_splits, int) else num_splits
    if splits is not None and (splits.parts < 1 or splits.parts & (splits.parts - 1)):
        raise UnsupportedShapeError(f"num_splits must be a power of two, not {splits.parts}")
    if choose_backend(q_SNH.device, backend) == "torch":
        return reference_attention.decode_attention(q_SNH, kv_cache, block_tables_SB, seq_lens_S, rule)
    out_SNH = torch.empty(q_SNH.shape, dtype=q_SNH.dtype, device=q_SNH.device)
    run_short(short_queries(queries, rule, tile, splits), out_SNH, queries, rule)
    return out_SNH


def short_queries(
    queries: PagedQueries,
    rule: ScoreRule,
    tile: AttentionTile | None = None,
    splits: Splits | None = None,
    prefix_len: int = 0,
) -> Launch:
    """The launch for sequences of one query or few: as many parts as fill the device.

    Keys before `prefix_len` are left to another launch.
    """
    q_TNH = queries.q_TNH
    table = launch_table(architecture(q_TNH.device))
    if tile is None:
        tile = attention_tile(table.decode, q_TNH.shape[2], q_TNH.dtype, queries.kv_cache.dtype)
    if splits is None:
        longest = rule.visible_span(queries.block_tables_SB.shape[1] * queries.kv_cache.shape[3] - prefix_len)
        splits = decode_splits(table, queries.num_seqs * queries.num_kv_heads, longest, tile.block_n)
    return short_launch(queries, tile, splits, prefix_len=prefix_len)
