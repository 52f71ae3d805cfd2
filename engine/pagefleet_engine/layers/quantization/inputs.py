"""Quantizes a layer's inputs at run time, as a checkpoint's scheme says.

Numbers come back in a floating type that holds each of them exactly, for products that a CPU (or an older GPU) does.

Shapes: T tokens, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagefleet_kernels.reference import scale_of_rows
from torch import Tensor

from pagefleet_engine.layers.quantization_scheme import Number, Rounding
from pagefleet_engine.ranks.group import RankGroup

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each format; dynamic scales map the largest input to it."""

_LEAST = -128.0
# A scale of zero would divide by zero; smaller inputs than this become zero, as they are.
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class FixedScale:
    """How a checkpoint fixes a layer's rounding; both float32 scalars."""

    scale: Tensor
    zero: Tensor | None = None
    """A whole number, where the scheme has zero points."""


def joined(scales_P: Tensor, zeros_P: Tensor | None) -> FixedScale:
    """Of parts that read the same inputs, which are rounded once: that of the widest range."""
    if zeros_P is None:
        return FixedScale(scales_P.amax())
    if len(scales_P) == 1:
        return FixedScale(scales_P[0], zeros_P[0].to(torch.float32))
    least = (scales_P * (_LEAST - zeros_P)).amin()
    scale = ((scales_P * (LARGEST["int8"] - zeros_P)).amax() - least) / (LARGEST["int8"] - _LEAST)
    return FixedScale(scale, (_LEAST - least / scale).round_())


class InputQuantizer:
    """Scales and rounds inputs as `rounding` says; `fixed` where it has scales per tensor.

    Where `ranks` share a token's inputs, they share its scale too: a small message, and the numbers are those of one
    rank.
    """

    __slots__ = ("_fixed", "_ranks", "_rounding")

    def __init__(self, rounding: Rounding, fixed: FixedScale | None, ranks: RankGroup | None = None) -> None:
        assert (fixed is not None) == (rounding.scales == "tensor"), "a fixed scale is part of the scheme"
        self._rounding, self._fixed, self._ranks = rounding, fixed, ranks

    def quantize(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded numbers less their zero points in float32 [T, I], and what one stands for: float32, broadcasts over
        [T, I]."""
        q_TI, scale, zero = self.numbers(x_TI)
        return (q_TI if zero is None else q_TI.sub_(zero)), scale

    def numbers(self, x_TI: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same with zero points apart, None where there are none: float32, as the scales."""
        number, ranks = self._rounding.number, self._ranks
        x_TI = x_TI.to(torch.float32, copy=True)
        if self._rounding.bound is not None:
            x_TI.clamp_(-self._rounding.bound, self._rounding.bound)
        if self._rounding.group is not None:
            return *self._quantize_groups(x_TI, self._rounding.group), None
        if self._fixed is not None:
            scale, zero = scale_of_rows(self._fixed.scale, x_TI), self._fixed.zero
        elif self._rounding.zero_points:
            scale, zero = dynamic_zero(x_TI, ranks)
        else:
            scale, zero = dynamic_scale(x_TI, number, ranks), None
        x_TI.div_(scale)
        if zero is None:
            return round_to(x_TI, number), scale, None
        return x_TI.round_().add_(zero).clamp_(_LEAST, LARGEST[number]), scale, zero

    def row_scales(self, x_TI: Tensor) -> Tensor:
        """float32 [T], what one of each row's numbers stands for; of scales per tensor or token without zero points."""
        if self._fixed is not None:
            return scale_of_rows(self._fixed.scale, x_TI).view(-1)
        return dynamic_scale(x_TI, self._rounding.number, self._ranks).view(-1)

    def round_trip(self, x_TI: Tensor) -> Tensor:
        """The inputs that the numbers stand for, in x's type."""
        q_TI, scale = self.quantize(x_TI)
        return q_TI.mul_(scale).to(x_TI.dtype)

    def _quantize_groups(self, x_TI: Tensor, size: int) -> tuple[Tensor, Tensor]:
        num_inputs, number = x_TI.shape[-1], self._rounding.number
        x_TI = torch.nn.functional.pad(x_TI, (0, -num_inputs % size))
        x_TGi = x_TI.view(*x_TI.shape[:-1], x_TI.shape[-1] // size, size)  # -1 is no number of groups of no rows
        scale_TG1 = dynamic_scale(x_TGi, number)
        q_TI = round_to(x_TGi.div_(scale_TG1), number).flatten(-2)[..., :num_inputs]
        return q_TI, scale_TG1.expand_as(x_TGi).flatten(-2)[..., :num_inputs]


def dynamic_scale(x: Tensor, number: Number, ranks: RankGroup | None = None) -> Tensor:
    """The scale that maps the largest magnitude along the last axis to the format's largest number; keeps the axis.

    `ranks`: who has the rest of that axis.
    """
    largest = _of_ranks(x.abs().amax(-1, keepdim=True).to(torch.float32), ranks)
    return largest.div_(LARGEST[number]).clamp_min_(_SMALLEST_SCALE)


def dynamic_zero(x: Tensor, ranks: RankGroup | None = None) -> tuple[Tensor, Tensor]:
    """The scale and the zero point, a whole number, that map what lies along the last axis, and zero, to int8."""
    ends = torch.stack((-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))).to(torch.float32).clamp_min_(0.0)
    ends = _of_ranks(ends, ranks)
    scale = ends.sum(0).div_(LARGEST["int8"] - _LEAST).clamp_min_(_SMALLEST_SCALE)
    return scale, (ends[0] / scale).round_().add_(_LEAST)


def _of_ranks(largest: Tensor, ranks: RankGroup | None) -> Tensor:
    """The largest of all ranks; not every network's maximum keeps a NaN, and a rank's own has to stay."""
    return largest if ranks is None else torch.maximum(ranks.all_reduce(largest.clone(), "max"), largest)


def round_to(x: Tensor, number: Number) -> Tensor:
    """The nearest numbers of the format, ties to even, in x's type; beyond its range the largest. x is overwritten."""
    x.clamp_(-LARGEST[number], LARGEST[number])
    return x.round_() if number == "int8" else x.copy_(x.to(torch.float8_e4m3fn))
