"""The tensors that compressed-tensors stores a matrix in.

Source: compressed-tensors' `pack_quantized`, `int_quantized` and `float_quantized`. Shapes: O outputs, I inputs, G
groups, R rows, N numbers of a row, W words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_engine.compression.grid import Rounded
from pagefleet_engine.compression.recipe import Recipe

_WORD_BITS = 32


def stored_tensors(layer: str, matrix: Rounded, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """By name; scales are in `dtype`, the model's, in which they are exact."""
    scales = matrix.scales.to(dtype)
    if not recipe.is_packed:
        number = torch.int8 if recipe.scheme == "int8" else torch.float8_e4m3fn
        return {f"{layer}.weight": matrix.numbers_OI.to(number), f"{layer}.weight_scale": scales}
    bits, middle = recipe.bits, 1 << (recipe.bits - 1)
    tensors = {
        f"{layer}.weight_packed": pack((matrix.numbers_OI + middle).to(torch.uint8), bits),
        f"{layer}.weight_scale": scales,
        f"{layer}.weight_shape": torch.tensor(matrix.numbers_OI.shape, dtype=torch.int64),
    }
    if not recipe.is_symmetric:
        zeros_GO = (matrix.zeros_OG + middle).to(torch.uint8).t()
        tensors[f"{layer}.weight_zero_point"] = pack(zeros_GO, bits).t().contiguous()
    return tensors


def pack(numbers_RN: Tensor, bits: int) -> Tensor:
    """int32 [R, W] of uint8 numbers of 4 or 8 bits, the first in the lowest bits; zeros fill the last word."""
    bytes_RN = F.pad(numbers_RN, (0, -numbers_RN.shape[1] % (_WORD_BITS // bits)))
    if bits == 4:
        bytes_RN = bytes_RN[:, ::2] | bytes_RN[:, 1::2] << 4
    # By way of one dimension: a single row may have any stride, and is contiguous all the same.
    return bytes_RN.contiguous().view(-1).view(torch.int32).view(len(bytes_RN), -1)


def stored_bytes(outputs: int, inputs: int, recipe: Recipe, scale_bytes: int) -> int:
    """How much a matrix takes on disk, about."""
    groups = 1 if recipe.group_size is None else inputs // recipe.group_size
    return outputs * inputs * recipe.bits // 8 + outputs * groups * (scale_bytes + 1) + 4 * inputs
