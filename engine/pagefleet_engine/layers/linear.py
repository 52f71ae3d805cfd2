"""Linear layers: single, merged, with an activation, and the gated pair of an MLP.

Shapes: T tokens, I inputs, O outputs, G gate width.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagefleet_kernels.activation import activation, gated_activation
from pagefleet_kernels.quantize import Activations, Quantized, QuantizeSpec
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import Activation, GpuLinear, LinearKernel
from pagefleet_engine.layers.matrix import Matrix, matrix_slots
from pagefleet_engine.layers.norm import Residual
from pagefleet_engine.layers.quantization.coded import CodedLinear
from pagefleet_engine.layers.quantization.packed import PackedLinear
from pagefleet_engine.layers.quantization.scaled import ScaledLinear
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.token_ranks import token_ranks
from pagefleet_engine.layers.weight import Placement, Weight


class Linear:
    """`y = x W^T + b`, where W may stack several projections of the same input."""

    __slots__ = ("_bias_O", "_kernel", "_leaves_sums", "_num_rows", "_slots", "rounding")

    def __init__(self, inputs: int | Shard, outputs: tuple[int | Shard, ...], bias: bool, placement: Placement) -> None:
        """`outputs`: rows of each stacked projection, in order; `placement.path` names the layer. A rank has the rows
        and columns that are its own."""
        self._kernel: LinearKernel
        # With kernels the next norm takes the sum along, and the product its bias.
        self._leaves_sums = bias and placement.use_kernels
        self._bias_O: Tensor | None = None
        self._num_rows = sum(shard_of(output).size for output in outputs)
        self.rounding: QuantizeSpec | None = None
        """How its inputs are rounded, which whoever computes them may do; known once the matrix has arrived."""
        self._slots = matrix_slots(inputs, outputs, placement, self._install_matrix)
        if bias:
            self._slots["bias"] = Weight(outputs, None, placement, self._install_bias)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, x_TI: Activations) -> Tensor:
        """[T, I] to [T, O]."""
        return _multiply(self._kernel, x_TI, self._bias_O)

    def add_to(self, residual_TO: Tensor, x_TI: Activations) -> Residual:
        """`residual + x W^T + b`, the sum left to the next norm where the product cannot take it in; the residual must
        not be read afterwards."""
        if self._leaves_sums:
            return residual_TO, self(x_TI)
        assert isinstance(x_TI, Tensor), "only products by kernels take rounded inputs"
        return self._kernel.linear_add(x_TI, residual_TO, self._bias_O), None

    def _install_matrix(self, matrix: Matrix) -> None:
        self._kernel = matrix.kernel(0, self._num_rows)
        self._leaves_sums |= isinstance(self._kernel, ScaledLinear | PackedLinear | CodedLinear)
        self.rounding = _rounding_of(self._kernel)

    def _install_bias(self, bias_O: Tensor) -> None:
        self._bias_O = bias_O


class DividedLinear(Linear):
    """A linear layer whose inputs are divided among ranks: each multiplies its own, and gets the sum of its tokens.

    The first rank adds the bias, and, where ranks have all tokens, the residual if its product can: so neither is a
    pass of its own here either.
    """

    __slots__ = ("_index", "_norms_add", "_tokens")

    def __init__(self, inputs: Shard, outputs: int, bias: bool, placement: Placement) -> None:
        self._index, self._tokens = placement.tensor.index, token_ranks(placement)
        self._norms_add = placement.use_kernels and not self._tokens.have_all
        super().__init__(inputs, (outputs,), bias, placement)

    def __call__(self, x_TI: Activations) -> Tensor:
        """[T, I] to [U, O], where I are this rank's inputs, and U its tokens of the residual stream."""
        return self._tokens.sum(super().__call__(x_TI))

    def add_to(self, residual_TO: Tensor, x_TI: Activations) -> Residual:
        """See Linear; the residual is that of this rank's tokens."""
        if self._leaves_sums:
            return residual_TO, self(x_TI)
        if not self._tokens.have_all:
            return residual_TO.add_(self(x_TI)), None
        if self._index > 0:
            return self(x_TI), None
        total_TO, _ = super().add_to(residual_TO, x_TI)
        return self._tokens.sum(total_TO), None

    def _install_matrix(self, matrix: Matrix) -> None:
        super()._install_matrix(matrix)
        self._leaves_sums |= self._norms_add

    def _install_bias(self, bias_O: Tensor) -> None:
        if self._index == 0:
            super()._install_bias(bias_O)


def input_linear(inputs: Shard, outputs: int, bias: bool, placement: Placement) -> Linear:
    """The layer for inputs that may be divided among ranks."""
    if placement.tensor.size == 1:
        return Linear(inputs, (outputs,), bias, placement)
    return DividedLinear(inputs, outputs, bias, placement)


class ActivatedLinear(Linear):
    """`act(x W^T + b)`."""

    __slots__ = ("_activation", "_use_kernels")

    def __init__(
        self, inputs: int, outputs: tuple[int | Shard, ...], bias: bool, placement: Placement, activation: Activation
    ) -> None:
        """See Linear."""
        self._activation, self._use_kernels = activation, placement.use_kernels
        super().__init__(inputs, outputs, bias, placement)

    def activated(self, x_TI: Activations, rounding: QuantizeSpec | None = None) -> Activations:
        """[T, I] to [T, O], rounded where that is asked for (by kernels only)."""
        if self._use_kernels:
            return activation(self(x_TI), self._activation, quantize=rounding)
        assert isinstance(x_TI, Tensor), "only products by kernels take rounded inputs"
        return self._kernel.linear_activated(x_TI, self._bias_O, self._activation)


class GatedLinear:
    """`act(x Wg^T + bg) * (x Wu^T + bu)`, gate and up stacked in that order (Shazeer, arXiv 2002.05202).

    With kernels one product gives both and one kernel joins them; without, two products, and joining them is free.
    """

    __slots__ = ("_activation", "_bias_G2", "_gate", "_merged", "_slots", "_up", "_use_kernels", "_width", "rounding")

    def __init__(
        self,
        inputs: int,
        outputs: tuple[int | Shard, ...],
        bias: bool,
        placement: Placement,
        activation: Activation = "silu",
    ) -> None:
        """`outputs`: gate and up as the checkpoint has them, (G, G) when apart and (2G,) when in one tensor."""
        self._gate: LinearKernel
        self._up: LinearKernel
        self._merged: LinearKernel
        self._width = sum(shard_of(output).size for output in outputs) // 2
        self._activation = activation
        self._use_kernels = placement.use_kernels
        self._bias_G2: Tensor | None = None
        self.rounding: QuantizeSpec | None = None
        """See Linear."""
        self._slots = matrix_slots(inputs, outputs, placement, self._install_matrix)
        if bias:
            self._slots["bias"] = Weight(outputs, None, placement, self._install_bias)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def __call__(self, x_TI: Activations, rounding: QuantizeSpec | None = None) -> Activations:
        """[T, I] to [T, G], rounded where that is asked for (by kernels only)."""
        bias_G2 = self._bias_G2
        if self._use_kernels:
            if isinstance(self._merged, GpuLinear) and rounding is None:
                assert isinstance(x_TI, Tensor), "only scaled products take rounded inputs"
                return self._merged.linear_gated(x_TI, bias_G2, self._activation)
            return gated_activation(_multiply(self._merged, x_TI, bias_G2), self._activation, quantize=rounding)
        assert isinstance(x_TI, Tensor), "only products by kernels take rounded inputs"
        gate_bias_G, up_bias_G = (None, None) if bias_G2 is None else (bias_G2[: self._width], bias_G2[self._width :])
        gate_TG = self._gate.linear_activated(x_TI, gate_bias_G, self._activation)
        return self._up.linear_mul(x_TI, gate_TG, up_bias_G)

    def _install_matrix(self, matrix: Matrix) -> None:
        if self._use_kernels:
            self._merged = matrix.kernel(0, 2 * self._width)
            self.rounding = _rounding_of(self._merged)
        else:
            self._gate = matrix.kernel(0, self._width)
            self._up = matrix.kernel(self._width, 2 * self._width)

    def _install_bias(self, bias_G2: Tensor) -> None:
        self._bias_G2 = bias_G2


def _rounding_of(kernel: LinearKernel) -> QuantizeSpec | None:
    return kernel.rounding if isinstance(kernel, ScaledLinear) else None


def _multiply(kernel: LinearKernel, x_TI: Activations, bias_O: Tensor | None) -> Tensor:
    if isinstance(x_TI, Quantized):
        assert isinstance(kernel, ScaledLinear), "only products by kernels take rounded inputs"
        return kernel.linear_rounded(x_TI, bias_O)
    return kernel.linear(x_TI, bias_O)
