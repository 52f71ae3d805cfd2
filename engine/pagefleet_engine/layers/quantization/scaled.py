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

    __slots__ = ("_block", "_dtype", "_inputs", "_scales", "_sums_O", "_values_OI", "rounding")

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
        self._values_OI, self._scales, self._dtype = values_OI, scales, dtype
        self._block = None if scheme.block is None else scheme.block[1]
        rounding = scheme.rounding
        self._inputs = None if rounding is None else KernelInputs(rounding, fixed)
        self._sums_O = None if rounding is None else row_sums(values_OI, rounding)
        is_plain = rounding is not None and not rounding.zero_points and rounding.bound is None
        self.rounding = rounding_spec(rounding, fixed) if rounding is not None and is_plain else None
        """How whoever computes the inputs may round them; None: not at all."""

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if self._inputs is None:
            return scaled_matmul(x_TI, None, self._values_OI, self._scales, bias_O, self._dtype, self._block)
        x, zeros = self._inputs.quantize(x_TI)
        return self._product(x, bias_O, shift_of(zeros, self._sums_O))

    def linear_rounded(self, x: Quantized, bias_O: Tensor | None) -> Tensor:
        """The same for inputs that were rounded as `rounding` says."""
        return self._product(x, bias_O)

    def _product(self, x: Quantized, bias_O: Tensor | None, shift: Shift | None = None) -> Tensor:
        return scaled_matmul(
            x.values, x.scale, self._values_OI, self._scales, bias_O, self._dtype, self._block, shift=shift
        )


class KernelInputs:
    """Rounds inputs by pagefleet_kernels, as a scheme says."""

    __slots__ = ("_bound", "_fixed", "_has_zeros", "_spec")

    def __init__(self, rounding: Rounding, fixed: FixedScale | None) -> None:
        """`fixed`: where the scheme has scales per tensor; what is written there later counts as well."""
        self._spec, self._bound, self._has_zeros = rounding_spec(rounding, fixed), rounding.bound, rounding.zero_points
        self._fixed = None if fixed is None or fixed.zero is None else (fixed.scale, fixed.zero)

    def quantize(self, x_TI: Tensor) -> tuple[Quantized, Tensor | None]:
        """Numbers, and where the scheme has them zero points, as in Shift."""
        if self._bound is not None:
            x_TI = x_TI.clamp(-self._bound, self._bound)
        return quantize_with_zeros(x_TI, self._fixed) if self._has_zeros else (quantize(x_TI, self._spec), None)


def row_sums(values_OI: Tensor, rounding: Rounding) -> Tensor | None:
    """int32 [O], as in Shift, where inputs have zero points."""
    return values_OI.sum(1, dtype=torch.int32) if rounding.zero_points else None


def shift_of(zeros: Tensor | None, sums: Tensor | None) -> Shift | None:
    """None where there are no zero points."""
    return None if zeros is None or sums is None else Shift(zeros, sums)


def rounding_spec(rounding: Rounding, fixed: FixedScale | None) -> QuantizeSpec:
    """What kernels are told of a rounding around zero."""
    return QuantizeSpec(STORAGE[rounding.number], None if fixed is None else fixed.scale, rounding.group)
