"""Quantizes a layer's inputs at run time, as a checkpoint's scheme says.

Numbers come back in a floating type that holds each of them exactly, for products that a CPU (or an older GPU) does.

Shapes: T tokens, I inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_engine.layers.quantization_scheme import Number, QuantizationScheme
from pagefleet_engine.ranks.group import RankGroup

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each format; dynamic scales map the largest input to it."""

# A scale of zero would divide by zero; smaller inputs than this become zero, as they are.
_SMALLEST_SCALE = 1e-12


class InputQuantizer:
    """Scales and rounds inputs as `scheme` says; `input_scale` is its fixed scale where it has one.

    Where `ranks` share a token's inputs, they share its scale too: a small message, and the numbers are those of one
    rank.
    """

    __slots__ = ("_group", "_input_scale", "_number", "_ranks")

    def __init__(self, scheme: QuantizationScheme, input_scale: Tensor | None, ranks: RankGroup | None = None) -> None:
        assert (input_scale is not None) == (scheme.input_scales == "tensor"), "a fixed scale is part of the scheme"
        self._number = scheme.number
        self._input_scale = input_scale
        self._ranks = ranks
        self._group = scheme.block[1] if scheme.input_scales == "group" and scheme.block is not None else None

    def quantize(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded numbers in float32 [T, I], and what one of them stands for: float32, broadcasts over [T, I]."""
        x_TI = x_TI.to(torch.float32, copy=True)
        if self._group is not None:
            return self._quantize_groups(x_TI, self._group)
        scale = self._input_scale if self._input_scale is not None else dynamic_scale(x_TI, self._number, self._ranks)
        return round_to(x_TI.div_(scale), self._number), scale

    def round_trip(self, x_TI: Tensor) -> Tensor:
        """The inputs that the numbers stand for, in x's type."""
        q_TI, scale = self.quantize(x_TI)
        return q_TI.mul_(scale).to(x_TI.dtype)

    def _quantize_groups(self, x_TI: Tensor, size: int) -> tuple[Tensor, Tensor]:
        num_inputs = x_TI.shape[-1]
        x_TI = torch.nn.functional.pad(x_TI, (0, -num_inputs % size))
        x_TGi = x_TI.view(*x_TI.shape[:-1], -1, size)
        scale_TG1 = dynamic_scale(x_TGi, self._number)
        q_TI = round_to(x_TGi.div_(scale_TG1), self._number).flatten(-2)[..., :num_inputs]
        return q_TI, scale_TG1.expand_as(x_TGi).flatten(-2)[..., :num_inputs]


def dynamic_scale(x: Tensor, number: Number, ranks: RankGroup | None = None) -> Tensor:
    """The scale that maps the largest magnitude along the last axis to the format's largest number; keeps the axis.

    `ranks`: who has the rest of that axis.
    """
    largest = x.abs().amax(-1, keepdim=True).to(torch.float32)
    if ranks is not None:
        largest = ranks.all_reduce(largest, "max")
    return largest.div_(LARGEST[number]).clamp_min_(_SMALLEST_SCALE)


def round_to(x: Tensor, number: Number) -> Tensor:
    """The nearest numbers of the format, ties to even, in x's type; beyond its range the largest. x is overwritten."""
    x.clamp_(-LARGEST[number], LARGEST[number])
    return x.round_() if number == "int8" else x.copy_(x.to(torch.float8_e4m3fn))
