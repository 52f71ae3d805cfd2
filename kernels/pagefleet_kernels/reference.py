"""The torch twins of a layer's kernels: vectorised, correct first. They are the oracle of the tests and the CPU path.

Shapes: T tokens, N query heads, K key heads, H head dim, D hidden width, I intermediate width or inputs, O outputs,
C = I / block, P positions, R rotary dim. Twins of attention and of sampling are in modules `reference_*`. The public
functions that call these check shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagefleet_kernels.fp8 import FP8, FP8_MAX, LARGEST_FP8
from pagefleet_kernels.layout import split_kv

LARGEST = {FP8: FP8_MAX, torch.int8: 127.0}
"""The largest number of each type of eight bits."""


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Twin of `norm.rms_norm`."""
    x = x_TD.float()
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normalised * (1.0 + weight_D.float())).to(x_TD.dtype)
    return (normalised.to(x_TD.dtype) * weight_D).to(x_TD.dtype)


def layer_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Twin of `norm.layer_norm`."""
    x = F.layer_norm(x_TD.float(), x_TD.shape[-1:], None, None, eps) * weight_D.float()
    return (x if bias_D is None else x + bias_D.float()).to(x_TD.dtype)


def activation(x_TI: torch.Tensor, kind: str) -> torch.Tensor:
    """Twin of `activation.activation`."""
    match kind:
        case "silu":
            return F.silu(x_TI)
        case "relu":
            return F.relu(x_TI)
        case _:
            return F.gelu(x_TI, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated_activation(gate_up_TI2: torch.Tensor, kind: str) -> torch.Tensor:
    """Twin of `activation.gated_activation`."""
    gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
    return activation(gate_TI, kind) * up_TI


def few_rows_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    gate: str | None,
) -> torch.Tensor:
    """Twin of `few_rows_matmul.few_rows_matmul`."""
    sums_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        sums_TO += bias_O.float()
    if residual_TO is not None:
        return residual_TO.copy_(residual_TO.float() + sums_TO)
    out_TO = sums_TO.to(x_TI.dtype)
    return out_TO if gate is None else gated_activation(out_TO, gate)


def apply_rope(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned to `positions`, in float32 and rounded once (Su et al., arXiv 2104.09864).

    The first half of a head's first R elements turns against their second half, or neighbours against each other where
    `interleaved`; elements beyond R are copied. A row of the table holds R/2 cosines, then R/2 sines.
    """
    cos, sin = cos_sin_PR[positions_T].float().unsqueeze(1).chunk(2, dim=-1)
    return _rotate_heads(q_TNH, cos, sin, interleaved), _rotate_heads(k_TKH, cos, sin, interleaved)


def _rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    rotary_dim = 2 * half
    axis, shape = (-1, (half, 2)) if interleaved else (-2, (2, half))
    first, second = x[..., :rotary_dim].float().reshape(*x.shape[:-1], *shape).unbind(axis)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=axis).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Twin of `kv_cache.write_kv`."""
    keys, values = split_kv(kv_cache)
    block_size = keys.shape[2]
    written = slot_mapping_T >= 0
    slots = slot_mapping_T[written].long()
    block, offset = slots // block_size, slots % block_size
    keys[block, :, offset] = stored(k_TKH[written], k_scale, kv_cache.dtype)
    values[block, :, offset] = stored(v_TKH[written], v_scale, kv_cache.dtype)


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as a pool of this type holds them."""
    largest = LARGEST_FP8.get(dtype)
    return x.to(dtype) if largest is None else (x.float() / scale).clamp_(-largest, largest).to(dtype)


def prepare_heads(
    qkv_TMH: torch.Tensor,
    heads: tuple[int, int],
    cos_sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    forms: tuple[bool, bool],
    scales: tuple[float, float],
) -> torch.Tensor:
    """Twin of `heads.prepare_heads`."""
    q_TNH, k_TKH, v_TKH = qkv_TMH.split_with_sizes((heads[0], heads[1], heads[1]), 1)
    unit_offset, interleaved = forms
    if norms is not None:
        q_TNH = rms_norm(q_TNH, norms[0], eps, unit_offset)
        k_TKH = rms_norm(k_TKH, norms[1], eps, unit_offset)
    q_TNH, k_TKH = apply_rope(q_TNH, k_TKH, cos_sin_PR, positions_T, interleaved)
    if heads[1]:
        write_kv(k_TKH, v_TKH, kv_cache, slot_mapping_T, *scales)
    return q_TNH


def quantize(
    x_TI: torch.Tensor, dtype: torch.dtype, static_scale: torch.Tensor | None, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `quantize.quantize`."""
    x = x_TI.float()
    if static_scale is not None:
        scale = static_scale.view(1)
        return to_bytes(x / scale, dtype), scale_of_rows(scale, x) if dtype == torch.int8 else scale
    num_tokens, width = x.shape
    size = group or width
    num_groups = -(-width // size)
    grouped = F.pad(x, (0, num_groups * size - width)).view(num_tokens, num_groups, size)
    scale = (grouped.abs().amax(-1, keepdim=True) * (1.0 / LARGEST[dtype])).clamp_(min=1e-12)
    values = to_bytes(grouped / scale, dtype).flatten(1)[:, :width]
    return values.contiguous(), scale.squeeze(-1)


def quantize_with_zeros(
    x_TI: torch.Tensor, fixed: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of `quantize.quantize_with_zeros`."""
    x = x_TI.float()
    if fixed is not None:
        scale, zero = scale_of_rows(fixed[0], x), fixed[1].view(1)
    else:
        least, largest = x.amin(-1, keepdim=True).clamp_(max=0.0), x.amax(-1, keepdim=True).clamp_(min=0.0)
        scale = ((largest - least) * (1.0 / 255.0)).clamp_(min=1e-12)
        zero = (-least / scale).round_() - 128.0
    numbers = (x / scale).round_().add_(zero).clamp_(-128.0, 127.0)
    return numbers.to(torch.int8), scale, zero


def scale_of_rows(scale: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1]: one scale of all rows, but NaN for those that have a NaN, which would be a number in int8."""
    return torch.where(x_TI.amax(-1, keepdim=True).isnan(), torch.nan, scale)  # a fifth of what asking each takes


def to_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest numbers of `dtype`, ties to even; beyond its range the largest."""
    largest = LARGEST[dtype]
    x = x.clamp(-largest, largest)
    return (x.round_() if dtype == torch.int8 else x).to(dtype)


def scaled_matmul(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
    block: int | None,
    shift: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Twin of `scaled_matmul.scaled_matmul`; scales have the shapes that it has given them."""
    if block is not None:
        x, weight = x_TI.float(), weight_OI.float()
        if x_scale is not None:
            x = x * spread(x_scale, block, x.shape)
        sums_TO = x @ (weight * spread(weight_scale, block, weight.shape)).t()
    else:
        if x_TI.dtype == torch.int8:  # no device's product of bytes takes any shape and has exact sums everywhere
            sums_TO = (x_TI.double() @ weight_OI.double().t()).float()
        else:
            sums_TO = x_TI.float() @ weight_OI.float().t()
        if shift is not None:
            sums_TO -= shift[0].view(-1, 1) * shift[1]
        if x_scale is not None:
            sums_TO *= x_scale
        sums_TO *= weight_scale
    return (sums_TO if bias_O is None else sums_TO + bias_O.float()).to(out_dtype)


def spread(scales: torch.Tensor, block: int, shape: torch.Size) -> torch.Tensor:
    """Scales of blocks for every element of a [rows, columns] matrix; rows have one each, or share them by blocks."""
    columns = scales.repeat_interleave(block, dim=1)[:, : shape[1]]
    if scales.shape[0] == shape[0]:
        return columns
    return columns.repeat_interleave(block, dim=0)[: shape[0]]
