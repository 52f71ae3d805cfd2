"""A matrix in numbers of a few bits, and its products.

Shapes: T tokens, I inputs, O outputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers, packed_matmul, packed_rounded_matmul
from pagefleet_kernels.quantize import quantize
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import LinearKernel
from pagefleet_engine.layers.quantization.inputs import InputQuantizer
from pagefleet_engine.layers.quantization.kernels import NativeLinear, QuantizedLinear
from pagefleet_engine.layers.quantization.packing import Unpacked
from pagefleet_engine.layers.quantization.scaled import rounding_spec
from pagefleet_engine.layers.quantization_scheme import PackedScheme, Rounding
from pagefleet_engine.ranks.group import RankGroup

_ROWS_AT_ONCE = 1024
"""That are dequantized in float32."""


def dequantize_packed(scheme: PackedScheme, matrix: Unpacked, groups_I: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] of the numbers that it stands for; `groups_I`: int64, the group of each input."""
    out_OI = torch.empty(matrix.codes_OI.shape, dtype=dtype, device=matrix.codes_OI.device)
    for start in range(0, len(out_OI), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        values = matrix.codes_OI[rows].to(torch.float32)
        if matrix.zeros_OG is None:
            values -= 1 << (scheme.bits - 1)
        else:
            values -= matrix.zeros_OG[rows][:, groups_I]
        out_OI[rows] = values.mul_(matrix.scales_OG[rows][:, groups_I])
    return out_OI


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Implements `layers.matrix.Matrix`."""

    weights: PackedWeights
    order_I: Tensor | None
    """int32: which input each column multiplies; None: its own."""
    dtype: torch.dtype
    """Of the model."""
    rounding: Rounding | None = None
    """Of inputs, per token."""
    native: Library | None = None
    """Who multiplies on a CPU."""
    input_ranks: RankGroup | None = None
    """Those that the columns, and so the inputs, are divided among."""
    in_act_order: bool = False
    """Whether matrices like this one may have an order."""

    @classmethod
    def of_numbers(
        cls,
        scheme: PackedScheme,
        matrix: Unpacked,
        groups_I: Tensor,
        dtype: torch.dtype,
        native: Library | None = None,
        input_ranks: RankGroup | None = None,
    ) -> PackedMatrix:
        """Columns side by side whose group is the same; each group has as many."""
        order_I = groups_I.argsort(stable=True)
        codes_OI, order = matrix.codes_OI, None
        if not torch.equal(order_I, torch.arange(len(order_I), device=order_I.device)):
            codes_OI, order = codes_OI[:, order_I], order_I.to(torch.int32)
        bits = 8 if scheme.bits == 8 else 4
        # Fewer bits are the same numbers around the middle of sixteen.
        more = (1 << (bits - 1)) - (1 << (scheme.bits - 1))
        zeros_OG = matrix.zeros_OG
        if more:
            codes_OI, zeros_OG = codes_OI + more, None if zeros_OG is None else zeros_OG + more
        weights = PackedWeights(pack_numbers(codes_OI, bits), matrix.scales_OG, zeros_OG, bits, scheme.group_size)
        return cls(weights, order, dtype, scheme.inputs, native, input_ranks, scheme.act_order)

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix."""
        weights = self.weights.rows(start, stop)
        if self.native is None:
            return PackedLinear(weights, self.order_I, self.rounding)
        inputs = None if self.rounding is None else InputQuantizer(self.rounding, None, self.input_ranks)
        return NativeLinear(PackedProduct(self.native, weights), inputs, self.order_I)

    def plain(self) -> Tensor:
        """See Matrix."""
        plain_OI = self.weights.dequantize().to(self.dtype)
        if self.order_I is None:
            return plain_OI
        return torch.empty_like(plain_OI).index_copy_(1, self.order_I.to(torch.int64), plain_OI)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        weights = self.weights
        parts = (weights.numbers, weights.scales_OG, weights.zeros_OG, weights.offsets_OG, self.order_I)
        return tuple(part for part in parts if part is not None)

    def of(self, stored: Sequence[Tensor]) -> PackedMatrix:
        """See Matrix."""
        left = iter(stored)
        weights = replace(
            self.weights,
            numbers=next(left),
            scales_OG=next(left),
            zeros_OG=None if self.weights.zeros_OG is None else next(left),
            offsets_OG=None if self.weights.offsets_OG is None else next(left),
        )
        return replace(self, weights=weights, order_I=None if self.order_I is None else next(left))


class PackedLinear(QuantizedLinear):
    """By pagefleet_kernels."""

    __slots__ = ("_order_I", "_spec", "_weights")

    def __init__(self, weights: PackedWeights, order_I: Tensor | None, rounding: Rounding | None) -> None:
        self._weights, self._order_I = weights, order_I
        self._spec = None if rounding is None else rounding_spec(rounding, None)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if self._order_I is not None:
            x_TI = x_TI.index_select(-1, self._order_I)
        if self._spec is None:
            return packed_matmul(x_TI, self._weights, bias_O)
        rounded = quantize(x_TI, self._spec)
        return packed_rounded_matmul(rounded.values, rounded.scale, self._weights, bias_O, x_TI.dtype)
