"""What attention over latents (MLA) keeps of a token, put into its pages.

Shapes: T tokens, N heads, H size of a query, R rank of the latent, Q rotated dimensions, W = R + Q, P positions.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_latents
from pagefleet_kernels.dispatch import Backend


def prepare_latents(
    q_TNH: torch.Tensor,
    kept_TW: torch.Tensor,
    norm_R: torch.Tensor,
    table_PQ: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    *,
    eps: float,
    interleaved: bool,
    scale: float = 1.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Normalise latents, rotate what follows them, store both; rotate the last Q of every query in place, and return q.

    `kept` holds latents [T, R] and behind them [T, Q]; `table` cosines, then sines, of half the rotated dimensions.
    Pairs that rotate against each other are neighbours where `interleaved`, else a half apart; rotated, the firsts of
    all pairs come first. `kv_cache` is a layer's view of the pool, [num_blocks, 1, 1, block_size, W]; tokens of slot -1
    are not stored. A pool of fp8 gets `value / scale`.
    """
    latents = kv_cache[:, 0, 0]
    return reference_latents.prepare_latents(
        q_TNH, kept_TW, norm_R, table_PQ, positions_T, latents, slot_mapping_T, eps, scale, interleaved=interleaved
    )


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
    backend: Backend | None = None,
) -> torch.Tensor:
    """TODO"""
    return reference_latents.latent_attention(
        q_TNW, latents, block_tables_SB, query_start_loc_S1, seq_lens_S, rank, scale, stored_scale
    )
