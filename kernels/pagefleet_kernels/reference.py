"""The torch twin of every kernel: vectorised, correct first. It is the oracle of the tests and the CPU path.

Shapes: T tokens, N query heads, K key heads, H head dim, D hidden width, I intermediate width, P positions, R rotary
dim. Those of attention are in `reference_attention`. Checks of shapes are made by the public functions that call these.
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
