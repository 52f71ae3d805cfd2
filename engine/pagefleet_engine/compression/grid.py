"""The numbers that a matrix may be stored in: which scale fits some weights, and which number is nearest to each.

Shapes: O outputs, I inputs, G groups of inputs; B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class Grid:
    """A weight is `(number - zero point) * scale`. Whole numbers are signed: of 4 bits from -8 to 7."""

    number: Literal["fp8", "int"]
    bits: int
    is_symmetric: bool
    """The zero point is 0."""
    is_lopsided: bool
    """There is one more number below zero than above it."""
    scale_dtype: torch.dtype
    """That scales are stored in: weights are rounded to what stored scales can say."""

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest number."""
        if self.number == "fp8":
            return -_FP8_LARGEST, _FP8_LARGEST
        largest = (1 << (self.bits - 1)) - 1
        return -largest - int(self.is_lopsided), largest

    def fit(self, weight_XN: Tensor) -> tuple[Tensor, Tensor]:
        """float32 scale and zero point, each [X, 1], under which a row's extremes are within the limits, or half a
        number beyond."""
        low, high = self.limits
        if self.is_symmetric:
            scale_X1 = self._stored(weight_XN.abs().amax(-1, keepdim=True) * 2.0 / (high - low))
            return scale_X1, torch.zeros_like(scale_X1)
        least_X1 = weight_XN.amin(-1, keepdim=True).clamp_(max=0.0)
        most_X1 = weight_XN.amax(-1, keepdim=True).clamp_(min=0.0)
        scale_X1 = self._stored((most_X1 - least_X1) / (high - low))
        return scale_X1, (low - least_X1 / scale_X1).round_().clamp_(low, high)

    def _stored(self, scale: Tensor) -> Tensor:
        smallest = torch.finfo(self.scale_dtype).tiny
        return scale.clamp(min=smallest).to(self.scale_dtype).to(torch.float32)

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest numbers in float32; beyond the limits the outermost."""
        low, high = self.limits
        number = (weight / scale + zero).clamp_(low, high)
        return number.round_() if self.number == "int" else number.to(torch.float8_e4m3fn).to(torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A matrix in such numbers, all float32; groups are of neighbours."""

    numbers_OI: Tensor
    scales: Tensor
    """[O, G], or [B, C] with blocks."""
    zeros_OG: Tensor
    """All 0 where the grid is symmetric, as with blocks."""
    block: int | None = None
    """Rows and columns of a block."""

    def weight(self) -> Tensor:
        """What the numbers stand for: float32 [O, I]."""
        outputs, inputs = self.numbers_OI.shape
        if self.block is not None:
            scale_OC = self.scales.repeat_interleave(self.block, 0)[:outputs]
            return self.numbers_OI * scale_OC.repeat_interleave(self.block, 1)[:, :inputs]
        groups_I = torch.arange(inputs) // (inputs // self.scales.shape[1])
        return (self.numbers_OI - self.zeros_OG[:, groups_I]) * self.scales[:, groups_I]


def round_to_nearest(weight_OI: Tensor, grid: Grid, group_size: int | None) -> Rounded:
    """Each weight by itself; `group_size` divides the inputs, None: they are one group."""
    outputs, inputs = weight_OI.shape
    weight_XN = weight_OI.float().reshape(-1, group_size or inputs)
    scale_X1, zero_X1 = grid.fit(weight_XN)
    numbers_OI = grid.nearest(weight_XN, scale_X1, zero_X1).view(outputs, inputs)
    return Rounded(numbers_OI, scale_X1.view(outputs, -1), zero_X1.view(outputs, -1))


def round_blocks(weight_OI: Tensor, grid: Grid, size: int) -> Rounded:
    """Each weight by itself, with a scale for `size` by `size` of them."""
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -inputs % size, 0, -outputs % size))
    rows, columns = padded.shape[0] // size, padded.shape[1] // size
    weight_XN = padded.view(rows, size, columns, size).transpose(1, 2).reshape(rows * columns, -1)
    scale_X1, zero_X1 = grid.fit(weight_XN)
    numbers = grid.nearest(weight_XN, scale_X1, zero_X1).view(rows, columns, size, size).transpose(1, 2)
    numbers_OI = numbers.reshape(padded.shape)[:outputs, :inputs].contiguous()
    scales_BC = scale_X1.view(rows, columns)
    return Rounded(numbers_OI, scales_BC, torch.zeros_like(scales_BC), block=size)
