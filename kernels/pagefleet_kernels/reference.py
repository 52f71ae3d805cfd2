"""The torch twin of every kernel: vectorised, correct first. It is the oracle of the tests and the CPU path.

Shapes: T tokens, S sequences, N query heads, K key heads, G = N / K, H head dim, L keys of the longest sequence, Q
queries of the longest chunk, D hidden width, I intermediate width, B blocks per table, P positions, R rotary dim.
Checks of shapes are made by the public functions that call these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagefleet_kernels.layout import split_kv


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Twin of `norm.rms_norm`."""
    x = x_TD.float()
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normalised.to(x_TD.dtype) * weight_D).to(x_TD.dtype)


def fused_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `norm.fused_add_rms_norm`."""
    total_TD = x_TD + residual_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def silu_and_mul(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """Twin of `activation.silu_and_mul`."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def apply_rope(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, cos_sin_cache_PR: torch.Tensor, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `rotary.apply_rope`."""
    cos, sin = cos_sin_cache_PR[positions_T].float().unsqueeze(1).chunk(2, dim=-1)
    return _rotate_heads(q_TNH, cos, sin), _rotate_heads(k_TKH, cos, sin)


def _rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def write_kv(k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    """Twin of `kv_cache.write_kv`."""
    keys, values = split_kv(kv_cache)
    block_size = keys.shape[2]
    written = slot_mapping_T >= 0
    slots = slot_mapping_T[written].long()
    block, offset = slots // block_size, slots % block_size
    keys[block, :, offset] = k_TKH[written].to(kv_cache.dtype)
    values[block, :, offset] = v_TKH[written].to(kv_cache.dtype)


def varlen_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start_loc_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Twin of `prefill_attention.varlen_attention`. Tokens past the last query get zeros.

    Sequences are padded to the longest: memory grows with S * N * Q * L, which is fine for an oracle.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    keys_SLKH, values_SLKH = (_gather_pages(pages, block_tables_SB, seq_lens_S) for pages in split_kv(kv_cache))
    num_seqs, num_keys, num_kv_heads, _ = keys_SLKH.shape

    starts = query_start_loc_S1.long()
    token_T = torch.arange(num_tokens, device=q_TNH.device)
    seq_T = torch.searchsorted(starts[1:].contiguous(), token_T, right=True)
    real_T = seq_T < num_seqs  # the rest pads the batch
    seq_T, token_T = seq_T[real_T], token_T[real_T]
    index_T = token_T - starts[seq_T]

    q_SQNH = q_TNH.new_zeros((num_seqs, max_query_len, num_heads, head_dim), dtype=torch.float32)
    q_SQNH[seq_T, index_T] = q_TNH[token_T].float()
    q_SQKGH = q_SQNH.view(num_seqs, max_query_len, num_kv_heads, -1, head_dim)
    scores_SKGQL = torch.einsum("sqkgh,slkh->skgql", q_SQKGH, keys_SLKH) * scale

    context_S = seq_lens_S.long() - starts.diff()
    query_pos_SQ1 = (context_S[:, None] + torch.arange(max_query_len, device=q_TNH.device))[:, :, None]
    key_pos_L = torch.arange(num_keys, device=q_TNH.device)
    visible_SQL = (key_pos_L <= query_pos_SQ1) & (key_pos_L < seq_lens_S[:, None, None])
    if sliding_window is not None:
        visible_SQL &= key_pos_L > query_pos_SQ1 - sliding_window
    hidden = ~visible_SQL[:, None, None]
    # the second fill is for queries that see no key at all: their softmax is not a number
    weights = scores_SKGQL.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
    out_SQNH = torch.einsum("skgql,slkh->sqkgh", weights, values_SLKH).flatten(2, 3)

    out_TNH = torch.zeros_like(q_TNH, memory_format=torch.contiguous_format)
    out_TNH[token_T] = out_SQNH[seq_T, index_T].to(q_TNH.dtype)
    return out_TNH


def decode_attention(
    q_SNH: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Twin of `decode_attention.decode_attention`."""
    starts = torch.arange(q_SNH.shape[0] + 1, device=q_SNH.device)
    return varlen_attention(q_SNH, kv_cache, block_tables_SB, starts, seq_lens_S, scale, 1, sliding_window)


def _gather_pages(pages: torch.Tensor, block_tables_SB: torch.Tensor, seq_lens_S: torch.Tensor) -> torch.Tensor:
    """Keys or values of every sequence in order, float32 [S, L, K, H], zero past the end of a sequence."""
    num_seqs, block_size = seq_lens_S.shape[0], pages.shape[2]
    num_blocks = -(-int(seq_lens_S.max()) // block_size) if num_seqs else 0
    # entries of a table past its sequence may hold anything, and so may the pages they name
    gathered_SLKH = pages[block_tables_SB[:, :num_blocks].clamp(min=0).long()].transpose(2, 3).flatten(1, 2).float()
    past_SL = torch.arange(num_blocks * block_size, device=pages.device) >= seq_lens_S[:, None]
    return gathered_SLKH.masked_fill(past_SL[:, :, None, None], 0.0)
