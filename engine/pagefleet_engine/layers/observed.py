"""Products that tell somebody what they multiply, so that their matrices can be calibrated.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pagefleet_engine.layers.linear_kernel import Activation, LinearKernel


class ObservedLinear:
    """Tells before it multiplies; implements `LinearKernel`."""

    __slots__ = ("_kernel", "_see")

    def __init__(self, kernel: LinearKernel, see: Callable[[Tensor], None]) -> None:
        """`see` gets the inputs [T, I] of each product; it must not keep them."""
        self._kernel, self._see = kernel, see

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        self._see(x_TI)
        return self._kernel.linear(x_TI, bias_O)

    def linear_activated(self, x_TI: Tensor, bias_O: Tensor | None, activation: Activation) -> Tensor:
        """See LinearKernel."""
        self._see(x_TI)
        return self._kernel.linear_activated(x_TI, bias_O, activation)

    def linear_mul(self, x_TI: Tensor, factor_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        self._see(x_TI)
        return self._kernel.linear_mul(x_TI, factor_TO, bias_O)

    def linear_add(self, x_TI: Tensor, residual_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        self._see(x_TI)
        return self._kernel.linear_add(x_TI, residual_TO, bias_O)
