"""Products by pagefleet_kernels: weights stay in eight bits, inputs come rounded, or are by a kernel of their own.

Shapes: T tokens, I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

import torch
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize, quantize_with_zeros
from pagefleet_kernels.scaled_matmul import Shift, scaled_matmul
from torch import Tensor

from pagefleet_engine.layers.quantization.inputs import FixedScale
from pagefleet_engine.layers.quantization.kernels import QuantizedLinear
from pagefleet_engine.layers.quantization_scheme import STORAGE, QuantizationScheme, Rounding


class ScaledLinear(QuantizedLinear):
    """fp8 or int8 by the device's own instruction where it has one; scales and bias join before the rounding."""

    __slots__ = ("_block", "_bound", "_dtype", "_fixed", "_scales", "_spec", "_sums_O", "_values_OI", "rounding")

    def __init__(
        self,
        values_OI: Tensor,
        scales: Tensor,
        scheme: QuantizationScheme,
        fixed: FixedScale | None,
        dtype: torch.dtype,
    ) -> None:
        """`scales`: float32 [O], or [B, C] with blocks, which are square. `fixed`: where the scheme has it. `dtype`: of
        the products."""
        self._values_OI, self._scales, self._dtype, self._fixed = values_OI, scales, dtype, fixed
        self._block = None if scheme.block is None else scheme.block[1]
        rounding = scheme.rounding
        self._spec = None if rounding is None else rounding_spec(rounding, fixed)
        self._bound = None if rounding is None else rounding.bound
        # int32, as the sums that they are taken from.
        has_zeros = rounding is not None and rounding.zero_points
        self._sums_O = values_OI.sum(1, dtype=torch.int32) if has_zeros else None
        self.rounding = None if has_zeros or self._bound is not None else self._spec
        """How whoever computes the inputs may round them; None: not at all."""

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if self._sums_O is not None:
            fixed = None if self._fixed is None or self._fixed.zero is None else (self._fixed.scale, self._fixed.zero)
            x, zeros = quantize_with_zeros(x_TI, fixed)
            return self._product(x, bias_O, Shift(zeros, self._sums_O))
        if self._spec is not None:
            if self._bound is not None:
                x_TI = x_TI.clamp(-self._bound, self._bound)
            return self._product(quantize(x_TI, self._spec), bias_O)
        return scaled_matmul(x_TI, None, self._values_OI, self._scales, bias_O, self._dtype, self._block)

    def linear_rounded(self, x: Quantized, bias_O: Tensor | None) -> Tensor:
        """The same for inputs that were rounded as `rounding` says."""
        return self._product(x, bias_O)

    def _product(self, x: Quantized, bias_O: Tensor | None, shift: Shift | None = None) -> Tensor:
        return scaled_matmul(
            x.values, x.scale, self._values_OI, self._scales, bias_O, self._dtype, self._block, shift=shift
        )


def rounding_spec(rounding: Rounding, fixed: FixedScale | None) -> QuantizeSpec:
    """What kernels are told of a rounding around zero."""
    return QuantizeSpec(STORAGE[rounding.number], None if fixed is None else fixed.scale, rounding.group)
