"""Twins of `quantize` and `scaled_matmul`: the oracle of their tests, and the right answer on a CPU.

Shapes: T tokens, I inputs, O outputs, C = I / block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagefleet_kernels.fp8 import FP8, FP8_MAX

LARGEST = {FP8: FP8_MAX, torch.int8: 127.0}
"""The largest number of each type of eight bits."""


def quantize(
    x_TI: torch.Tensor, dtype: torch.dtype, static_scale: torch.Tensor | None, group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `quantize.quantize`."""
    x = x_TI.float()
    if static_scale is not None:
        scale = static_scale.view(1)
        return to_bytes(x / scale, dtype), scale
    num_tokens, width = x.shape
    size = group or width
    num_groups = -(-width // size)
    grouped = F.pad(x, (0, num_groups * size - width)).view(num_tokens, num_groups, size)
    scale = (grouped.abs().amax(-1, keepdim=True) * (1.0 / LARGEST[dtype])).clamp_(min=1e-12)
    values = to_bytes(grouped / scale, dtype).flatten(1)[:, :width]
    return values.contiguous(), scale.squeeze(-1)


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
