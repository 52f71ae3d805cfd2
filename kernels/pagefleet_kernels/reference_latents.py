"""Torch twins of the kernels for attention over latents (MLA), written to be read.

Shapes: T tokens, S sequences, N heads, H size of a query, R rank of the latent, Q rotated dimensions, W = R + Q, P
positions, C context.
"""

from __future__ import annotations

import torch

from pagefleet_kernels.reference import apply_rope, rms_norm, stored


def prepare_latents(
    q_TNH: torch.Tensor,
    kept_TW: torch.Tensor,
    norm_R: torch.Tensor,
    table_PQ: torch.Tensor,
    positions_T: torch.Tensor,
    latents: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    eps: float,
    scale: float,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Twin of `latents.prepare_latents`."""
    rank, block_size = norm_R.shape[0], latents.shape[1]
    rotated = table_PQ.shape[1]
    q_TNQ, k_T1Q = q_TNH[..., -rotated:], kept_TW[:, None, rank:]
    q_TNH[..., -rotated:], k_T1Q = apply_rope(q_TNQ, k_T1Q, table_PQ, positions_T, interleaved)
    kept_TW = torch.cat((rms_norm(kept_TW[:, :rank], norm_R, eps), k_T1Q[:, 0]), -1)
    written = slot_mapping_T >= 0
    slots = slot_mapping_T[written].long()
    latents[slots // block_size, slots % block_size] = stored(kept_TW[written], scale, latents.dtype)
    return q_TNH


def latent_attention(
    q_TNW: torch.Tensor,
    latents: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor | None,
    seq_lens_S: torch.Tensor,
    rank: int,
    scale: float,
    stored_scale: float,
) -> torch.Tensor:
    """Twin of `latent_attention.latent_attention`: one sequence after another, in float32."""
    num_tokens, num_heads, _ = q_TNW.shape
    out_TNR = q_TNW.new_zeros(num_tokens, num_heads, rank)
    num_seqs = len(seq_lens_S)
    starts = list(range(num_seqs + 1)) if query_start_loc_S1 is None else query_start_loc_S1.tolist()
    for seq, length in enumerate(seq_lens_S.tolist()):
        first, last = starts[seq], starts[seq + 1]
        if length == 0 or first == last:
            continue
        blocks = block_tables_SB[seq, : -(-length // latents.shape[1])].long()
        kept_CW = latents[blocks].flatten(0, 1)[:length].float() * stored_scale
        scores_NQC = torch.einsum("qnw,cw->nqc", q_TNW[first:last].float(), kept_CW) * scale
        column = torch.arange(length, device=latents.device)
        hidden_QC = column > column[length - (last - first) :, None]
        weights_NQC = scores_NQC.masked_fill(hidden_QC, -torch.inf).softmax(-1)
        out_TNR[first:last] = (weights_NQC @ kept_CW[:, :rank]).transpose(0, 1).to(q_TNW.dtype)
    return out_TNR
