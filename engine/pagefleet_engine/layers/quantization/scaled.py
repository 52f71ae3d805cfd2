"""Products by pagefleet_kernels: weights stay in eight bits, inputs are rounded by a kernel of their own.

Shapes: T tokens, I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

from pagefleet_kernels.quantize import QuantizeSpec, quantize
from pagefleet_kernels.scaled_matmul import scaled_matmul
from torch import Tensor

from pagefleet_engine.layers.quantization.kernels import QuantizedLinear
from pagefleet_engine.layers.quantization.scheme import QuantizationScheme


class ScaledLinear(QuantizedLinear):
    """fp8 or int8 by the device's own instruction where it has one; scales and bias join before the rounding."""

    __slots__ = ("_block", "_inputs", "_scales", "_values_OI")

    def __init__(
        self, values_OI: Tensor, scales: Tensor, scheme: QuantizationScheme, input_scale: Tensor | None
    ) -> None:
        """`scales`: float32 [O], or [B, C] with blocks, which are square. `input_scale`: where the scheme fixes it."""
        self._values_OI, self._scales = values_OI, scales
        self._block = None if scheme.block is None else scheme.block[1]
        self._inputs: QuantizeSpec | None = None
        if scheme.input_scales != "none":
            group = self._block if scheme.input_scales == "group" else None
            self._inputs = QuantizeSpec(scheme.storage, input_scale, group)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        values_OI, scales = self._values_OI, self._scales
        if self._inputs is None:
            return scaled_matmul(x_TI, None, values_OI, scales, bias_O, x_TI.dtype, self._block)
        numbers_TI, scale = quantize(x_TI, self._inputs)
        return scaled_matmul(numbers_TI, scale, values_OI, scales, bias_O, x_TI.dtype, self._block)
