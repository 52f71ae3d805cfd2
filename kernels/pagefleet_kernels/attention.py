"""Attention over the paged pool for any batch: picks the decode or the ragged path from what the host knows."""

from __future__ import annotations

import torch

from pagefleet_kernels.decode_attention import decode_attention
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.prefill_attention import varlen_attention
from pagefleet_kernels.score_rule import ScoreRule


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
        return decode_attention(
            q_TNH,
            kv_cache,
            block_tables_SB,
            seq_lens_S,
            rule,
            backend=backend,
        )
    return varlen_attention(
        q_TNH,
        kv_cache,
        block_tables_SB,
        query_start_loc_S1,
        seq_lens_S,
        rule,
        max_query_len,
        backend=backend,
    )
