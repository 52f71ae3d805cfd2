"""Matrices that tell somebody what they multiply, so that they can be calibrated.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pagefleet_engine.layers.linear_kernel import Activation, LinearKernel


class ObservedMatrix:
    """A plain matrix; implements `layers.matrix.Matrix`."""

    __slots__ = ("_kernel_of", "_see", "weight_OI")

    def __init__(
        self,
        weight_OI: Tensor,
        kernel_of: Callable[[Tensor], LinearKernel],
        see: Callable[[Tensor], None],
    ) -> None:
        """`see` gets the inputs [T, I] of each product, once for all of the rows; it must not keep them."""
        self.weight_OI, self._kernel_of, self._see = weight_OI, kernel_of, see

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix. Parts of a matrix read the same inputs: the first alone tells of them."""
        kernel = self._kernel_of(self.weight_OI[start:stop])
        return ObservedLinear(kernel, self._see) if start == 0 else kernel

    def plain(self) -> Tensor:
        """See Matrix."""
        return self.weight_OI.clone()

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        return (self.weight_OI,)

    def of(self, stored: Sequence[Tensor]) -> ObservedMatrix:
        """See Matrix."""
        return ObservedMatrix(stored[0], self._kernel_of, self._see)


class ObservedLinear:
    """Tells before it multiplies; implements `LinearKernel`."""

    __slots__ = ("_kernel", "_see")

    def __init__(self, kernel: LinearKernel, see: Callable[[Tensor], None]) -> None:
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
