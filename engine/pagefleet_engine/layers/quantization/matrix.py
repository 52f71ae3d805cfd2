"""A quantized matrix that has arrived: stored numbers and their scales.

Shapes: I inputs, O outputs, B blocks of outputs by C blocks of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import LinearKernel, PlainLinear, linear_kernel
from pagefleet_engine.layers.quantization.form import Form
from pagefleet_engine.layers.quantization.inputs import InputQuantizer, dynamic_scale, round_to
from pagefleet_engine.layers.quantization.kernels import ExpandedLinear, PackedInt8Linear, RescaledLinear
from pagefleet_engine.layers.quantization.scaled import ScaledLinear
from pagefleet_engine.layers.quantization_scheme import STORAGE, Number, QuantizationScheme


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """Implements `layers.matrix.Matrix`."""

    scheme: QuantizationScheme
    form: Form
    values_OI: Tensor
    scales: Tensor
    """float32: [O], or [B, C] with scales per block."""
    input_scale: Tensor | None
    """float32 scalar, where the scheme has a fixed one."""
    dtype: torch.dtype
    """Of the model."""
    traceable: bool = False
    """See Placement."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix; with scales per block, rows start where a block does."""
        values_OI, scales = self.values_OI[start:stop], self._scales(start, stop)
        inputs = None if self.scheme.input_scales == "none" else InputQuantizer(self.scheme, self.input_scale)
        match self.form:
            case Form.EXPANDED:
                weight_OI = dequantize(values_OI, scales, self.scheme.block).to(self.dtype)
                return ExpandedLinear(PlainLinear(weight_OI) if self.traceable else linear_kernel(weight_OI), inputs)
            case Form.RESCALED:
                assert inputs is not None, "numbers are multiplied by numbers"
                return RescaledLinear(values_OI, scales, inputs, self.dtype)
            case Form.PACKED_INT8:
                assert inputs is not None, "numbers are multiplied by numbers"
                return PackedInt8Linear(values_OI, scales, inputs)
            case Form.SCALED:
                return ScaledLinear(values_OI, scales, self.scheme, self.input_scale, self.dtype)

    def _scales(self, start: int, stop: int) -> Tensor:
        if self.scheme.block is None:
            return self.scales[start:stop]
        rows = self.scheme.block[0]
        assert start % rows == 0, "rows start where a block does"
        return self.scales[start // rows : -(-stop // rows)]


def dequantize(values_OI: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The float32 numbers that stored ones stand for."""
    wide_OI = values_OI.to(torch.float32)
    if block is None:
        return wide_OI.mul_(scales[:, None])
    outputs, inputs = values_OI.shape
    scale_OC = scales.repeat_interleave(block[0], 0)[:outputs]
    return wide_OI.mul_(scale_OC.repeat_interleave(block[1], 1)[:, :inputs])


def quantize_rows(weight_OI: Tensor, number: Number) -> tuple[Tensor, Tensor]:
    """Numbers [O, I] in their storage type, and float32 scales [O]."""
    scale_O1 = dynamic_scale(weight_OI, number)
    values_OI = round_to(weight_OI.to(torch.float32).div_(scale_O1), number).to(STORAGE[number])
    return values_OI, scale_O1.squeeze(-1)
