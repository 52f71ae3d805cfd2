"""How a matrix is kept and multiplied: plain, or laid out once for oneDNN or our compiled kernels, which is read two to
four times faster.

These also take the operation that follows (an activation, a product, a residual sum) into the same call, so
that it costs no pass over memory of its own. Everything else sees only `LinearKernel`.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from pagefleet_kernels.activation import Kind, gated_activation
from pagefleet_kernels.few_rows_matmul import few_rows_matmul, takes_few_rows
from pagefleet_kernels.native.dense import DenseProduct, is_fastest
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.products import ACTIVATIONS, NativeProduct, Then
from torch import Tensor

ROWS_HINT = 32
"""Rows that oneDNN assumes when it chooses the packed layout. Layouts chosen for 1 to 256 rows were equally fast in
bfloat16; the one for a single row was twice as slow at 16 rows in float32."""

Activation = Kind

# oneDNN's name and algorithm for each
_POST_OPS = {
    "silu": ("swish", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "relu": ("relu", ""),
}


class LinearKernel(Protocol):
    """One matrix `W_OI`, ready to be applied to `x_TI`; `bias_O` may be None. All return [T, O] in x's dtype."""

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b`."""
        ...

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """`act(x W^T + b)`."""
        ...

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """`(x W^T + b) * factor`."""
        ...

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b + residual`; the residual may be overwritten."""
        ...


class PlainLinear:
    """The matrix as the checkpoint has it."""

    __slots__ = ("_weight_OI",)

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return F.linear(x_TI, self._weight_OI, bias_O)

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        return activate(F.linear(x_TI, self._weight_OI, bias_O), activation)

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return F.linear(x_TI, self._weight_OI, bias_O).mul_(factor_TO)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel. The sum happens inside the matrix product, before it is rounded."""
        total_TO = residual_TO.addmm_(x_TI, self._weight_OI.t())
        return total_TO if bias_O is None else total_TO.add_(bias_O)


class GpuLinear(PlainLinear):
    """The plain matrix on a GPU: few rows are multiplied by our kernels, more by cuBLAS."""

    __slots__ = ()

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if takes_few_rows(x_TI, self._weight_OI):
            return few_rows_matmul(x_TI, self._weight_OI, bias_O)
        return super().linear(x_TI, bias_O)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        if takes_few_rows(x_TI, self._weight_OI):
            return few_rows_matmul(x_TI, self._weight_OI, bias_O, residual_TO=residual_TO)
        return super().linear_add(x_TI, residual_TO, bias_O)

    def linear_gated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """`act(gate) * up`, [T, O / 2], where the matrix stacks gate and up."""
        if takes_few_rows(x_TI, self._weight_OI):
            return few_rows_matmul(x_TI, self._weight_OI, bias_O, gate=activation)
        return gated_activation(super().linear(x_TI, bias_O), activation)


class OneDnnLinear:
    """The matrix in oneDNN's blocked layout; the plain form is not kept."""

    __slots__ = ("_apply", "_combine", "_packed")

    def __init__(self, weight_OI: Tensor) -> None:
        # The overloads themselves: resolving them at each call costs as much as a small product.
        ops: Any = torch.ops.mkldnn
        self._apply = ops._linear_pointwise.default
        self._combine = ops._linear_pointwise.binary
        self._packed: Tensor = ops._reorder_linear_weight.default(weight_OI, ROWS_HINT)

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        out: Tensor = self._apply(x_TI, self._packed, bias_O, "none", [], "")
        return out

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        name, algorithm = _POST_OPS[activation]
        out: Tensor = self._apply(x_TI, self._packed, bias_O, name, [], algorithm)
        return out

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        out: Tensor = self._combine(x_TI, factor_TO, self._packed, bias_O, "mul")
        return out

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        out: Tensor = self._combine(x_TI, residual_TO, self._packed, bias_O, "add")
        return out


class CompiledLinear:
    """By compiled kernels of a CPU."""

    __slots__ = ("product",)

    def __init__(self, product: NativeProduct) -> None:
        self.product = product

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._apply(x_TI, bias_O)

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        if activation not in ACTIVATIONS:
            return activate(self._apply(x_TI, bias_O), activation)
        return self._apply(x_TI, bias_O, activation)

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._apply(x_TI, bias_O, "multiply", factor_TO)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        return self._apply(x_TI, bias_O, "add", residual_TO, residual_TO)

    def _apply(
        self,
        x_TI: Tensor,
        bias_O: Tensor | None,
        then: Then = "nothing",
        other_TO: Tensor | None = None,
        out_TO: Tensor | None = None,
    ) -> Tensor:
        return self.product(x_TI, bias_O, then=then, other_TO=other_TO, out_TO=out_TO)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """`act(x)`; x may be overwritten."""
    match activation:
        case "silu":
            return F.silu(x, inplace=True)
        case "relu":
            return F.relu(x, inplace=True)
        case _:
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def is_laid_out(dtype: torch.dtype, device: torch.device, native: Library | None) -> bool:
    """Whether `linear_kernel` keeps a copy of its own of such a matrix."""
    return (native is not None and is_fastest(native, dtype)) or can_pack(dtype, device)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch and this processor multiply oneDNN's packed matrices of the type."""
    mkldnn: Any = torch.backends.mkldnn
    if device.type != "cpu" or not mkldnn.is_available():
        return False
    ops: Any = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(hasattr(ops, "_is_mkldnn_bf16_supported") and ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def linear_kernel(weight_OI: Tensor, native: Library | None = None) -> LinearKernel:
    """The fastest form of the matrix here. It may share memory with `weight_OI`, or be a copy.

    `native`: the compiled kernels of a CPU.
    """
    if native is not None and is_fastest(native, weight_OI.dtype):
        return CompiledLinear(DenseProduct(native, weight_OI))
    if can_pack(weight_OI.dtype, weight_OI.device):
        return OneDnnLinear(weight_OI)
    return GpuLinear(weight_OI) if weight_OI.device.type == "cuda" else PlainLinear(weight_OI)
