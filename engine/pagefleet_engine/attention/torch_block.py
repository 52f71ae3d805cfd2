"""Attention of a block of queries to gathered keys and values, as batched matrix products.

Shapes: S rows of a group, Q queries of a row, C context, K key/value heads, G query heads of each, H size of a key, V
that of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec
from pagefleet_engine.attention.padded_groups import QueryBlock


def attend_block(q_SQKGH: Tensor, k: Tensor, v: Tensor, block: QueryBlock, spec: AttentionSpec) -> Tensor:
    """Attend [S, Q, K, G, H] queries to the block's part of keys [S * K, C, H] and values [S * K, C, V].

    Returns [S, Q, K, G, V] (a view for one query a row).
    """
    rows, queries, kv_heads, per_kv_head, head_dim = q_SQKGH.shape
    q = q_SQKGH.permute(0, 2, 3, 1, 4).reshape(rows * kv_heads, per_kv_head * queries, head_dim)
    k, v = k[:, block.first : block.end], v[:, block.first : block.end]
    unused = q.new_empty(1).expand(rows * kv_heads, per_kv_head * queries, k.shape[1])
    scale = spec.scale * spec.k_scale / (spec.softcap or 1.0)
    scores = torch.baddbmm(unused, q, k.transpose(1, 2), beta=0.0, alpha=scale)
    if spec.softcap is not None:
        scores.tanh_().mul_(spec.softcap)
    shaped = scores.view(rows, kv_heads, per_kv_head, queries, k.shape[1])
    if spec.alibi_slopes_N is not None:
        shaped -= _alibi(spec.alibi_slopes_N.view(kv_heads, per_kv_head), block).to(shaped.dtype)
    if block.bias_SQC is not None:
        shaped[..., block.masked_from - block.first :] += block.bias_SQC
    out = torch.bmm(torch.softmax(scores, dim=-1), v)
    if spec.sinks_N is not None:
        out *= _kept_by_sinks(spec.sinks_N.view(kv_heads, per_kv_head), shaped).view(*out.shape[:2], 1)
    if spec.v_scale != 1.0:
        out *= spec.v_scale
    return out.view(rows, kv_heads, per_kv_head, queries, v.shape[2]).permute(0, 3, 1, 2, 4)


def _alibi(slopes_KG: Tensor, block: QueryBlock) -> Tensor:
    """Slope times distance, [S, K, G, Q, C]."""
    distance_SQC = block.query_columns_SQ[:, :, None] - torch.arange(block.first, block.end)
    return slopes_KG[:, :, None, None] * distance_SQC[:, None, None]


def _kept_by_sinks(sinks_KG: Tensor, scores_SKGQC: Tensor) -> Tensor:
    """Share of the softmax that the keys keep beside their head's sink, [S, K, G, Q], in the dtype of the scores."""
    log_sums_SKGQ = scores_SKGQC.float().logsumexp(-1)
    return torch.sigmoid(log_sums_SKGQ - sinks_KG[:, :, None]).to(scores_SKGQC.dtype)
