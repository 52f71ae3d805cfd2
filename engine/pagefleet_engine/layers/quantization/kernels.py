"""Products with a quantized matrix; each implements `LinearKernel`.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.products import NativeProduct, Then
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import (
    ROWS_HINT,
    Activation,
    CompiledLinear,
    LinearKernel,
    activate,
    linear_kernel,
)
from pagefleet_engine.layers.quantization.form import exact_dtype
from pagefleet_engine.layers.quantization.inputs import InputQuantizer

# oneDNN multiplies unsigned inputs by signed weights; this stands for zero.
_ZERO_POINT = 128


class QuantizedLinear(ABC):
    """What follows a product is a pass of its own; a subclass says how to multiply."""

    __slots__ = ()

    @abstractmethod
    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        return activate(self.linear(x_TI, bias_O), activation)

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self.linear(x_TI, bias_O).mul_(factor_TO)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return residual_TO.add_(self.linear(x_TI, bias_O))


class RescaledLinear(QuantizedLinear):
    """Multiplies the stored numbers in a floating type that holds them, and scales the product.

    Exact but for the rounding of sums: of float32 where the model is float32, of bfloat16 else.
    """

    __slots__ = ("_exact", "_inputs", "_product", "_scale_O")

    def __init__(
        self,
        values_OI: Tensor,
        scale_O: Tensor,
        inputs: InputQuantizer,
        dtype: torch.dtype,
        native: Library | None = None,
    ) -> None:
        self._exact = exact_dtype(dtype)
        self._product: LinearKernel = linear_kernel(values_OI.to(self._exact), native)
        self._scale_O, self._inputs = scale_O, inputs

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        q_TI, scale = self._inputs.quantize(x_TI)
        sums_TO = self._product.linear(q_TI.to(self._exact), None)
        return rescale(sums_TO.float(), scale, self._scale_O, bias_O).to(x_TI.dtype)


class PackedInt8Linear(QuantizedLinear):
    """int8 in oneDNN's blocked layout; sums are exact 32-bit integers."""

    __slots__ = ("_apply", "_inputs", "_packed", "_scale_O", "_sums_O", "_zeros_O")

    def __init__(self, values_OI: Tensor, scale_O: Tensor, inputs: InputQuantizer) -> None:
        ops: Any = torch.ops.onednn
        self._apply = ops.qlinear_pointwise.default
        self._packed: Tensor = ops.qlinear_prepack.default(values_OI, [ROWS_HINT, values_OI.shape[1]])
        self._scale_O, self._inputs = scale_O.contiguous(), inputs
        self._sums_O = values_OI.sum(1, dtype=torch.int32) * scale_O
        self._zeros_O = torch.zeros(values_OI.shape[0], dtype=torch.int32)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        q_TI, scale, zero = self._inputs.numbers(x_TI)
        bytes_TI = q_TI.add_(_ZERO_POINT).to(torch.uint8)
        scaled_TO: Tensor = self._apply(
            bytes_TI, 1.0, _ZERO_POINT, self._packed, self._scale_O, self._zeros_O, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        if zero is not None:
            scaled_TO.sub_(zero * self._sums_O)
        return rescale(scaled_TO, scale, None, bias_O).to(x_TI.dtype)


class NativeLinear(CompiledLinear):
    """The same with a matrix in few bits, whose inputs are rounded."""

    __slots__ = ("_inputs", "_order_I")

    def __init__(
        self, product: NativeProduct, inputs: InputQuantizer | None = None, order_I: Tensor | None = None
    ) -> None:
        """`inputs`: who rounds rows to int8; None: the product itself, block by block. `order_I`: int32, which input
        each column multiplies; None: its own."""
        super().__init__(product)
        self._inputs, self._order_I = inputs, order_I

    def _apply(
        self,
        x_TI: Tensor,
        bias_O: Tensor | None,
        then: Then = "nothing",
        other_TO: Tensor | None = None,
        out_TO: Tensor | None = None,
    ) -> Tensor:
        if self._order_I is not None:
            x_TI = x_TI.index_select(-1, self._order_I)
        scales_T = None if self._inputs is None else self._inputs.row_scales(x_TI)
        return self.product(x_TI, bias_O, then=then, other_TO=other_TO, out_TO=out_TO, scales_T=scales_T)


class ExpandedLinear:
    """Multiplies by the numbers that the weights stand for, inputs rounded as the scheme says (or not at all)."""

    __slots__ = ("_inputs", "_product")

    def __init__(self, product: LinearKernel, inputs: InputQuantizer | None) -> None:
        """`product`: with the numbers that the weights stand for."""
        self._product, self._inputs = product, inputs

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._product.linear(self._round(x_TI), bias_O)

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        return self._product.linear_activated(self._round(x_TI), bias_O, activation)

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._product.linear_mul(self._round(x_TI), factor_TO, bias_O)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._product.linear_add(self._round(x_TI), residual_TO, bias_O)

    def _round(self, x_TI: Tensor) -> Tensor:
        return x_TI if self._inputs is None else self._inputs.round_trip(x_TI)


def rescale(sums_TO: Tensor, scale: Tensor, scale_O: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """`sums * scale * scale_O + bias` in float32; the sums are overwritten."""
    sums_TO.mul_(scale)
    if scale_O is not None:
        sums_TO.mul_(scale_O)
    return sums_TO if bias_O is None else sums_TO.add_(bias_O)
