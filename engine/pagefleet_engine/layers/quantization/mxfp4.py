"""Matrices in MXFP4, as gpt-oss stores its experts.

Shapes: I inputs, O outputs, J = I / 2 bytes, C = I / 32 scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.mxfp4 import LARGEST_SCALE, MXFP4_BLOCK, dequantize_mxfp4
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import pack_numbers
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import LinearKernel, linear_kernel
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.kernels import NativeLinear
from pagefleet_engine.layers.quantization_scheme import QuantizationScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Kept, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrix:
    """Implements `layers.matrix.Matrix`."""

    codes_OJ: Tensor
    scales_OC: Tensor
    """Both uint8."""
    dtype: torch.dtype
    """Of the model."""
    native: Library | None = None
    """Who multiplies on a CPU; None: whoever multiplies the numbers in the model's type."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix."""
        codes_OJ, scales_OC = self.codes_OJ[start:stop], self.scales_OC[start:stop]
        if self.native is None:
            return linear_kernel(dequantize_mxfp4(codes_OJ, scales_OC).to(self.dtype))
        codes_OI = torch.stack((codes_OJ & 15, codes_OJ >> 4), -1).flatten(1)
        weights = CodedWeights(pack_numbers(codes_OI, 4), None, scales_OC, None, MXFP4_BLOCK)
        return NativeLinear(PackedProduct(self.native, weights))

    def plain(self) -> Tensor:
        """See Matrix."""
        return dequantize_mxfp4(self.codes_OJ, self.scales_OC).to(self.dtype)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        return self.codes_OJ, self.scales_OC

    def of(self, stored: Sequence[Tensor]) -> Mxfp4Matrix:
        """See Matrix."""
        codes_OJ, scales_OC = stored
        return Mxfp4Matrix(codes_OJ, scales_OC, self.dtype, self.native)


def check_scales(scales: Tensor, path: str) -> None:
    """Raises ModelLoadError where one is no number, or so large that no kernel multiplies by it."""
    if bool((scales > LARGEST_SCALE).any()):
        raise ModelLoadError(f"{path}_scales holds no usable scale: download the checkpoint again")


def mxfp4_columns(inputs: Shard, path: str) -> tuple[Shard, Shard]:
    """Columns of codes, in bytes, and of scales that a rank has where these inputs are its own.

    Raises:
        ModelLoadError: they are no whole blocks.
    """
    if inputs.whole % MXFP4_BLOCK:
        raise ModelLoadError(f"{path} has {inputs.whole} inputs; MXFP4 has blocks of {MXFP4_BLOCK}: repair config.json")
    blocks = inputs.in_blocks_of(MXFP4_BLOCK)
    return blocks.times(MXFP4_BLOCK // 2), blocks


def mxfp4_kept(scheme: QuantizationScheme, inputs: int, placement: Placement) -> tuple[Kept, Kept]:
    """What stays in memory of codes and of scales: themselves, or the numbers alone, two of a byte; of experts that
    move, both."""
    match form_of(scheme, inputs, placement)[0]:
        case Form.EXPANDED:
            numbers, stored = 2 * placement.dtype.itemsize, int(placement.traceable)
            return Kept(scheme.storage, numbers=numbers + stored), Kept(scheme.storage, numbers=stored)
        case form:
            return Kept(scheme.storage), Kept(torch.float16 if form is Form.NATIVE else scheme.storage)
