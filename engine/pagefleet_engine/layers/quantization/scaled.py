"""Products by pagefleet_kernels: weights stay in eight bits, inputs come rounded, or are by a kernel of their own.

Shapes: T tokens, I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

import torch
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize
from pagefleet_kernels.scaled_matmul import scaled_matmul
from torch import Tensor

from pagefleet_engine.layers.quantization.kernels import QuantizedLinear
from pagefleet_engine.layers.quantization_scheme import QuantizationScheme


class ScaledLinear(QuantizedLinear):
    """fp8 or int8 by the device's own instruction where it has one; scales and bias join before the rounding."""

    __slots__ = ("_block", "_dtype", "_scales", "_values_OI", "rounding")

    def __init__(
        self,
        values_OI: Tensor,
        scales: Tensor,
        scheme: QuantizationScheme,
        input_scale: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`scales`: float32 [O], or [B, C] with blocks, which are square. `input_scale`: where the scheme fixes it.
        `dtype`: of the products."""
        self._values_OI, self._scales, self._dtype = values_OI, scales, dtype
        self._block = None if scheme.block is None else scheme.block[1]
        self.rounding: QuantizeSpec | None = None
        """How inputs are rounded, by this layer or by whoever computes them; None: not at all."""
        if scheme.input_scales != "none":
            group = self._block if scheme.input_scales == "group" else None
            self.rounding = QuantizeSpec(scheme.storage, input_scale, group)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if self.rounding is not None:
            return self.linear_rounded(quantize(x_TI, self.rounding), bias_O)
        return scaled_matmul(x_TI, None, self._values_OI, self._scales, bias_O, self._dtype, self._block)

    def linear_rounded(self, x: Quantized, bias_O: Tensor | None) -> Tensor:
        """The same for inputs that were rounded as `rounding` says."""
        return scaled_matmul(x.values, x.scale, self._values_OI, self._scales, bias_O, self._dtype, self._block)
