"""Experts on a CPU by compiled kernels: in the model's own type, or in numbers of 4 or 8 bits.

Shapes: as in experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.native.experts import PackedExperts, RoundedExperts, joins, takes_experts
from pagefleet_kernels.native.quantized import PackedProduct
from torch import Tensor

from pagefleet_engine.layers.matrix import Matrix
from pagefleet_engine.layers.moe.experts import with_room
from pagefleet_engine.layers.moe.routing import Routes
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.kernels import NativeLinear
from pagefleet_engine.layers.quantization_scheme import BlockScheme, CodedScheme, PackedScheme, Rounding, Scheme
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Placement


def native_experts(
    num_experts: int,
    hidden_size: int,
    width: Shard,
    gate: Gate,
    schemes: tuple[Scheme | None, Scheme | None],
    placement: Placement,
) -> NativeExperts | None:
    """None: there are no compiled kernels for such experts. `schemes`: of gate and up, and of down."""
    library, dtype = placement.native, placement.dtype
    if library is None or placement.traceable:
        return None
    if schemes == (None, None):
        if not takes_experts(dtype, hidden_size, width.size, gate):
            return None
        return NativeExperts(PackedExperts(library, num_experts, hidden_size, width.size, gate, dtype), num_experts)
    roundings = [_rounding(scheme) for scheme in schemes]
    if not joins(gate) or roundings[0] != roundings[1]:
        return None
    if not all(
        _is_taken(scheme, inputs, placement)
        for scheme, inputs in zip(schemes, (shard_of(hidden_size), width), strict=True)
    ):
        return None
    by_rows = roundings[0] is not None
    layer = RoundedExperts(library, num_experts, hidden_size, width.size, gate, dtype, rounds_rows=by_rows)
    return NativeExperts(layer, num_experts)


def _is_taken(scheme: Scheme | None, inputs: Shard, placement: Placement) -> bool:
    """Whether a matrix stays in few bits for compiled kernels, and who rounds its inputs needs them alone."""
    if scheme is None or form_of(scheme, inputs, placement)[0] is not Form.NATIVE:
        return False
    if isinstance(scheme, PackedScheme) and scheme.act_order:
        return False
    if isinstance(scheme, BlockScheme) and len(set(scheme.types)) > 1:
        return False
    rounding = _rounding(scheme)
    return rounding is None or (rounding.scales == "token" and not inputs.is_part)


def _rounding(scheme: Scheme | None) -> Rounding | None:
    """What happens to inputs; None: what the kernels do."""
    if scheme is None or isinstance(scheme, CodedScheme | BlockScheme):
        return None
    return scheme.inputs if isinstance(scheme, PackedScheme) else scheme.rounding


class NativeExperts:
    """Implements `Experts`. Gate, up and down of a row are rounded once, before `down`; the sum is of float32."""

    __slots__ = ("_down_bias_ED", "_gate_up_bias_EO", "_layer", "_num_experts")

    def __init__(self, layer: PackedExperts | RoundedExperts, num_experts: int) -> None:
        self._layer, self._num_experts = layer, num_experts
        self._gate_up_bias_EO: Tensor | None = None
        self._down_bias_ED: Tensor | None = None

    def install_gate_up(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        if isinstance(self._layer, RoundedExperts):
            width = self._layer.width
            self._layer.put_gate_up(expert, _product(matrix, 0, width), _product(matrix, width, 2 * width))
        else:
            (weight_OI,) = matrix.stored
            self._layer.put_gate_up(expert, self._layer.lay_out(*weight_OI.chunk(2)))

    def install_down(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        if isinstance(self._layer, RoundedExperts):
            self._layer.put_down(expert, _product(matrix, 0, self._layer.hidden))
        else:
            (weight_OI,) = matrix.stored
            self._layer.put_down(expert, self._layer.lay_out(weight_OI))

    def install_gate_up_bias(self, bias_EO: Tensor) -> None:
        """See Experts."""
        self._gate_up_bias_EO = with_room(bias_EO.float(), self._num_experts)
        self._layer.put_biases(self._gate_up_bias_EO, self._down_bias_ED)

    def install_down_bias(self, bias_ED: Tensor) -> None:
        """See Experts."""
        self._down_bias_ED = with_room(bias_ED.float(), self._num_experts)
        self._layer.put_biases(self._gate_up_bias_EO, self._down_bias_ED)

    def stored(self, expert: int) -> list[Tensor]:
        """See Experts; as kernels read it, so that it moves as it is."""
        return [*self._layer.stored(expert), *(bias_EO[expert] for bias_EO in self._biases())]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """See Experts."""
        biases = self._biases()
        count = len(stored) - len(biases)
        self._layer.take(expert, stored[:count])
        for bias_EO, bias_O in zip(biases, stored[count:], strict=True):
            bias_EO[expert] = bias_O

    def _biases(self) -> list[Tensor]:
        return [bias_EO for bias_EO in (self._gate_up_bias_EO, self._down_bias_ED) if bias_EO is not None]

    def __call__(self, x_RD: Tensor, routes: Routes) -> Tensor:
        """See Experts."""
        return self._layer(x_RD, routes.weights_TK, routes.experts_TK)


def _product(matrix: Matrix, start: int, stop: int) -> PackedProduct:
    kernel = matrix.kernel(start, stop)
    assert isinstance(kernel, NativeLinear), "the form is theirs"
    return kernel.product
