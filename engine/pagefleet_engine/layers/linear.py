"""Linear layers: single, merged, and the gated pair of Llama's MLP.

Shapes: T tokens, I inputs, O outputs, G gate width.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagefleet_kernels.activation import silu_and_mul
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import LinearKernel, linear_kernel
from pagefleet_engine.layers.weight import Placement, Weight


class Linear:
    """`y = x W^T + b`, where W may stack several projections of the same input."""

    __slots__ = ("_bias_O", "_kernel", "_slots")

    def __init__(self, inputs: int, outputs: tuple[int, ...], bias: bool, placement: Placement) -> None:
        """`outputs`: rows of each stacked projection, in order."""
        self._kernel: LinearKernel
        self._bias_O: Tensor | None = None
        self._slots = {"weight": Weight(outputs, inputs, placement, self._install_weight)}
        if bias:
            self._slots["bias"] = Weight(outputs, None, placement, self._install_bias)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._kernel.linear(x_TI, self._bias_O)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`residual + x W^T + b`; the residual must not be read afterwards."""
        return self._kernel.linear_add(x_TI, residual_TO, self._bias_O)

    def _install_weight(self, weight_OI: Tensor) -> None:
        self._kernel = linear_kernel(weight_OI)

    def _install_bias(self, bias_O: Tensor) -> None:
        self._bias_O = bias_O


class GatedLinear:
    """`silu(x Wg^T + bg) * (x Wu^T + bu)`, gate and up stacked in one slot in that order (Shazeer, arXiv 2002.05202).

    With kernels one product gives both and one kernel joins them; without, two products, and joining them is free.
    """

    __slots__ = ("_bias_G2", "_gate", "_merged", "_slots", "_up", "_use_kernels", "_width")

    def __init__(self, inputs: int, width: int, bias: bool, placement: Placement) -> None:
        self._gate: LinearKernel
        self._up: LinearKernel
        self._merged: LinearKernel
        self._width = width
        self._use_kernels = placement.use_kernels
        self._bias_G2: Tensor | None = None
        self._slots = {"weight": Weight((width, width), inputs, placement, self._install_weight)}
        if bias:
            self._slots["bias"] = Weight((width, width), None, placement, self._install_bias)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, G]."""
        bias_G2 = self._bias_G2
        if self._use_kernels:
            return silu_and_mul(self._merged.linear(x_TI, bias_G2))
        gate_bias_G, up_bias_G = (None, None) if bias_G2 is None else (bias_G2[: self._width], bias_G2[self._width :])
        gate_TG = self._gate.linear_silu(x_TI, gate_bias_G)
        return self._up.linear_mul(x_TI, gate_TG, up_bias_G)

    def _install_weight(self, weight_G2I: Tensor) -> None:
        if self._use_kernels:
            self._merged = linear_kernel(weight_G2I)
        else:
            self._gate = linear_kernel(weight_G2I[: self._width])
            self._up = linear_kernel(weight_G2I[self._width :])

    def _install_bias(self, bias_G2: Tensor) -> None:
        self._bias_G2 = bias_G2
