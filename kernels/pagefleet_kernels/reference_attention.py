"""The torch twins of the attention kernels: vectorised over the batch, correct first.

Shapes: T tokens, S sequences, N query heads, K key heads, G = N / K, H head dim, L keys of the longest sequence, Q
queries of the longest chunk, B blocks per table. Checks of shapes are made by the public functions that call these.
"""

from __future__ import annotations

import torch

from pagefleet_kernels.fp8 import LARGEST_FP8, as_bytes
from pagefleet_kernels.layout import split_kv
from pagefleet_kernels.score_rule import ScoreRule


def varlen_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
    max_query_len: int,
) -> torch.Tensor:
    """Twin of `attention.varlen_attention` and of `cascade_attention.cascade_attention`.

    Sequences are padded to the longest: memory grows with S * N * Q * L, which is fine for an oracle.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_seqs, device = seq_lens_S.shape[0], q_TNH.device
    starts = query_start_loc_S1.long()
    first_position_S = seq_lens_S.long() - starts.diff()
    query_pos_SQ = first_position_S[:, None] + torch.arange(max_query_len, device=device)
    num_blocks = -(-int(seq_lens_S.max()) // kv_cache.shape[3]) if num_seqs else 0
    key_pos_L = torch.arange(num_blocks * kv_cache.shape[3], device=device)
    visible_SQL = _visible(query_pos_SQ, key_pos_L, seq_lens_S, rule)
    # entries of a table that no query sees may be anything, and so may the pages that they name
    unused_SL = ~visible_SQL.any(1)
    keys_SLKH, values_SLKH = (
        _gather_pages(pages, block_tables_SB[:, :num_blocks]).masked_fill(unused_SL[:, :, None, None], 0.0)
        for pages in split_kv(kv_cache)
    )
    num_kv_heads = keys_SLKH.shape[2]

    token_T = torch.arange(num_tokens, device=device)
    seq_T = torch.searchsorted(starts[1:].contiguous(), token_T, right=True)
    real_T = seq_T < num_seqs  # the rest pads the batch
    seq_T, token_T = seq_T[real_T], token_T[real_T]
    index_T = token_T - starts[seq_T]

    q_SQNH = q_TNH.new_zeros((num_seqs, max_query_len, num_heads, head_dim), dtype=torch.float32)
    q_SQNH[seq_T, index_T] = q_TNH[token_T].float()
    q_SQKGH = q_SQNH.view(num_seqs, max_query_len, num_kv_heads, -1, head_dim)
    products_SKGQL = torch.einsum("sqkgh,slkh->skgql", q_SQKGH, keys_SLKH)
    k_scale, v_scale = rule.kv_scales(kv_cache.dtype)
    scores_SNQL = _scores(products_SKGQL.flatten(1, 2) * k_scale, query_pos_SQ, key_pos_L, rule)
    weights_SNQL = _weights(scores_SNQL, ~visible_SQL[:, None], rule)
    weights_SKGQL = weights_SNQL.view(num_seqs, num_kv_heads, -1, max_query_len, weights_SNQL.shape[3])
    out_SQNH = torch.einsum("skgql,slkh->sqkgh", weights_SKGQL, values_SLKH).flatten(2, 3) * v_scale

    out_TNH = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format)
    out_TNH[token_T] = out_SQNH[seq_T, index_T].to(q_TNH.dtype)
    return out_TNH


def decode_attention(
    q_SNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    seq_lens_S: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Twin of `decode_attention.decode_attention`."""
    starts = torch.arange(q_SNH.shape[0] + 1, device=q_SNH.device)
    return varlen_attention(q_SNH, kv_cache, block_tables_SB, starts, seq_lens_S, rule, 1)


def _visible(
    query_pos_SQ: torch.Tensor, key_pos_L: torch.Tensor, seq_lens_S: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Which keys each query sees [S, Q, L]; none for the queries that only pad."""
    position_SQ1 = query_pos_SQ[:, :, None]
    visible_SQL = (key_pos_L <= position_SQ1) & (position_SQ1 < seq_lens_S[:, None, None])
    if rule.window is not None:
        visible_SQL &= key_pos_L > position_SQ1 - rule.window
    if rule.chunk is not None:
        visible_SQL &= key_pos_L >= position_SQ1.div(rule.chunk, rounding_mode="floor") * rule.chunk
    return visible_SQL


def _scores(
    products_SNQL: torch.Tensor, query_pos_SQ: torch.Tensor, key_pos_L: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    scores_SNQL = products_SNQL * rule.scale
    if rule.softcap is not None:
        scores_SNQL = rule.softcap * torch.tanh(scores_SNQL / rule.softcap)
    if rule.alibi_slopes_N is not None:
        distance_S1QL = (query_pos_SQ[:, :, None] - key_pos_L)[:, None]
        scores_SNQL = scores_SNQL - rule.alibi_slopes_N[:, None, None] * distance_S1QL
    return scores_SNQL


def _weights(scores_SNQL: torch.Tensor, hidden_S1QL: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Softmax over the keys that are not hidden; zeros where all are."""
    scores_SNQL = scores_SNQL.masked_fill(hidden_S1QL, float("-inf"))
    if rule.sinks_N is not None:
        sinks_SNQ1 = rule.sinks_N[:, None, None].expand(*scores_SNQL.shape[:3], 1)
        return torch.cat((scores_SNQL, sinks_SNQ1), dim=-1).softmax(-1)[..., :-1]
    # the second fill is for queries that see no key at all: their softmax is not a number
    return scores_SNQL.softmax(-1).masked_fill(hidden_S1QL, 0.0)


def _gather_pages(pages: torch.Tensor, block_tables_SB: torch.Tensor) -> torch.Tensor:
    """Keys or values of every sequence in order, float32 [S, L, K, H], as they are stored."""
    stored = as_bytes(pages)[block_tables_SB.clamp(min=0).long()]
    stored = stored.view(pages.dtype) if pages.dtype in LARGEST_FP8 else stored
    return stored.float().transpose(2, 3).flatten(1, 2)
