"""Experts by pagefleet_kernels: all matrices side by side, products in launches of a fixed shape.

Shapes: R rows, K experts of each, E experts, I inputs, O outputs, D hidden size, G width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pagefleet_kernels.coded_experts import grouped_coded_matmul
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.expert_blocks import ExpertBlocks, align_experts
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.experts import ExpertWeights, combine_experts, grouped_matmul
from pagefleet_kernels.packed_experts import grouped_packed_matmul, order_inputs
from pagefleet_kernels.packed_matmul import PackedWeights
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.matrix import Matrix, PlainMatrix
from pagefleet_engine.layers.moe.experts import with_room
from pagefleet_engine.layers.moe.routing import Routes
from pagefleet_engine.layers.quantization.block_slots import StackedMatrix
from pagefleet_engine.layers.quantization.coded import CodedMatrix
from pagefleet_engine.layers.quantization.form import Form
from pagefleet_engine.layers.quantization.inputs import FixedScale, InputQuantizer, joined
from pagefleet_engine.layers.quantization.mxfp4 import Mxfp4Matrix
from pagefleet_engine.layers.quantization.packed import PackedMatrix
from pagefleet_engine.layers.quantization.scaled import KernelInputs, row_sums, shift_of
from pagefleet_engine.layers.quantization.slots import QuantizedMatrix

PackedFormat = tuple[int, int | None]
"""Bits of a number, and inputs of a group, as in `PackedWeights`."""
CodedFormat = tuple[Tensor | None, int]
"""What codes stand for, and inputs of a group, as in `CodedWeights`."""


class GroupedExperts:
    """Implements `Experts`; nothing in it asks the device, so that graphs may hold it."""

    __slots__ = ("_down", "_gate", "_gate_up", "_num_experts")

    def __init__(self, num_experts: int, gate: Gate) -> None:
        self._num_experts, self._gate = num_experts, gate
        self._gate_up, self._down = _Stack(num_experts), _Stack(num_experts)

    def install_gate_up(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        self._gate_up.put(expert, matrix)

    def install_down(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        self._down.put(expert, matrix)

    def install_gate_up_bias(self, bias_EO: Tensor) -> None:
        """See Experts."""
        self._gate_up.put_bias(with_room(bias_EO, self._num_experts))

    def install_down_bias(self, bias_ED: Tensor) -> None:
        """See Experts."""
        self._down.put_bias(with_room(bias_ED, self._num_experts))

    def stored(self, expert: int) -> list[Tensor]:
        """See Experts."""
        return [*self._gate_up.stored(expert), *self._down.stored(expert)]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """See Experts."""
        left = iter(stored)
        for stack in (self._gate_up, self._down):
            stack.take(expert, left)

    def __call__(self, x_RD: Tensor, routes: Routes) -> Tensor:
        """See Experts."""
        if not len(x_RD):  # a rank that is sent none
            return torch.zeros_like(x_RD)
        blocks = align_experts(routes.experts_TK, self._num_experts)
        gated_PG = self._gate_up.product(x_RD, routes.experts_TK, blocks, self._gate)
        out_PD = self._down.product(gated_PG, routes.experts_TK.view(-1, 1), blocks)
        return combine_experts(out_PD, routes.weights_TK, routes.experts_TK)


class _Stack:
    """One matrix of every expert, put side by side as they come."""

    __slots__ = (
        "_bias_EO",
        "_block",
        "_coded",
        "_factor_EO",
        "_inputs",
        "_num_experts",
        "_order_EI",
        "_packed",
        "_range",
        "_rounded",
        "_scales",
        "_sums_EO",
        "_values_EOI",
        "_zeros_EOG",
    )

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._values_EOI: Tensor | None = None
        self._scales: Tensor | None = None
        self._sums_EO: Tensor | None = None
        self._range: _SharedRange | None = None
        self._block: int | None = None
        self._inputs: InputQuantizer | None = None
        self._rounded: KernelInputs | None = None
        self._packed: PackedFormat | None = None
        self._coded: CodedFormat | None = None
        self._factor_EO: Tensor | None = None
        self._zeros_EOG: Tensor | None = None
        self._order_EI: Tensor | None = None
        self._bias_EO: Tensor | None = None

    def put(self, expert: int, matrix: Matrix) -> None:
        """Copy an expert's matrix to its place.

        Raises:
            ModelLoadError: it is quantized in a way that no kernel multiplies.
        """
        if isinstance(matrix, PlainMatrix):
            self._inputs = matrix.inputs
            values_OI, scales = matrix.weight_OI, None
        elif isinstance(matrix, Mxfp4Matrix):
            values_OI, scales = matrix.codes_OJ, matrix.scales_OC
        elif isinstance(matrix, PackedMatrix):
            values_OI, scales = self._take_packed(expert, matrix)
        elif isinstance(matrix, CodedMatrix):
            values_OI, scales = self._take_coded(expert, matrix)
        elif isinstance(matrix, StackedMatrix):
            raise ModelLoadError(
                "experts whose gate and up are in blocks of different types are not run on a GPU: give another file"
            )
        else:
            assert isinstance(matrix, QuantizedMatrix), "there is no other kind of matrix"
            values_OI, scales = matrix.values_OI, matrix.scales
            self._take_rounding(expert, matrix)
        if self._values_EOI is None:
            self._values_EOI = values_OI.new_empty(self._num_experts, *values_OI.shape)
            self._scales = None if scales is None else scales.new_empty(self._num_experts, *scales.shape)
        self._values_EOI[expert].copy_(values_OI)
        if scales is not None and self._scales is not None:
            self._scales[expert].copy_(scales)

    def put_bias(self, bias_EO: Tensor) -> None:
        """Of all experts.

        Raises:
            ModelLoadError: no kernel adds them to products in this form.
        """
        self._bias_EO = bias_EO
        self._check_bias()

    def _check_bias(self) -> None:
        bits = 4 if self._coded is not None else self._packed[0] if self._packed is not None else None
        if self._bias_EO is not None and bits is not None:
            raise ModelLoadError(
                f"experts with biases in {bits} bits are not run on a GPU: give MXFP4 in one tensor, or a float type"
            )

    def _take_packed(self, expert: int, matrix: PackedMatrix) -> tuple[Tensor, Tensor]:
        """Numbers and scales; zero points and the order of columns are put in their places."""
        weights = matrix.weights
        if matrix.rounding is not None:
            self._rounded = KernelInputs(matrix.rounding, None)
        self._packed = weights.bits, weights.group
        self._check_bias()
        if weights.zeros_OG is not None:
            if self._zeros_EOG is None:
                self._zeros_EOG = weights.zeros_OG.new_empty(self._num_experts, *weights.zeros_OG.shape)
            self._zeros_EOG[expert].copy_(weights.zeros_OG)
        if matrix.in_act_order and self._order_EI is None:
            own_I = torch.arange(weights.num_inputs, dtype=torch.int32, device=weights.numbers.device)
            self._order_EI = own_I.repeat(self._num_experts, 1)
        if self._order_EI is not None and matrix.order_I is not None:
            self._order_EI[expert].copy_(matrix.order_I)
        return weights.numbers, weights.scales_OG

    def _take_coded(self, expert: int, matrix: CodedMatrix) -> tuple[Tensor, Tensor]:
        """Codes and scales; what one number is for each row is put in its place."""
        weights = matrix.weights
        self._coded = weights.table, weights.group
        self._check_bias()
        if weights.factor_O is not None:
            if self._factor_EO is None:
                self._factor_EO = weights.factor_O.new_empty(self._num_experts, *weights.factor_O.shape)
            self._factor_EO[expert].copy_(weights.factor_O)
        return weights.codes, weights.scales_OG

    def stored(self, expert: int) -> list[Tensor]:
        """All that there is of an expert."""
        return [one[expert] for one in self._of_each()]

    def take(self, expert: int, stored: Iterator[Tensor]) -> None:
        """Copy what `stored` gave in another rank, in place."""
        for one in self._of_each():
            one[expert].copy_(next(stored))
        if self._range is not None:
            self._range.join()

    def _of_each(self) -> list[Tensor]:
        shared = () if self._range is None else self._range.of_each
        parts = (
            self._values_EOI, self._scales, self._zeros_EOG, self._factor_EO, self._order_EI, self._bias_EO,
            self._sums_EO, *shared,
        )  # fmt: skip
        return [one for one in parts if one is not None]

    def product(self, x_RI: Tensor, experts_RK: Tensor, blocks: ExpertBlocks, gate: Gate | None = None) -> Tensor:
        """See `grouped_matmul`; inputs are rounded, or put in order, first where the experts' scheme says so."""
        assert self._values_EOI is not None, "the loader fills every expert"
        top_k, dtype = experts_RK.shape[1], x_RI.dtype
        if self._order_EI is not None:
            x_RI, top_k = order_inputs(x_RI, self._order_EI, experts_RK), 1
        if self._inputs is not None:
            x_RI = self._inputs.round_trip(x_RI)
        x, zeros = (x_RI, None) if self._rounded is None else self._rounded.quantize(x_RI)
        if self._packed is not None:
            packed = self._packed_weights(*self._packed)
            return grouped_packed_matmul(x, packed, self._num_experts, blocks, dtype, top_k=top_k, gate=gate)
        if self._coded is not None:
            coded = self._coded_weights(*self._coded)
            return grouped_coded_matmul(x_RI, coded, self._num_experts, blocks, top_k=top_k, gate=gate)
        weights = ExpertWeights(self._values_EOI, self._scales, self._block, self._bias_EO)
        shift = shift_of(zeros, self._sums_EO)
        return grouped_matmul(x, weights, blocks, dtype, top_k=top_k, gate=gate, shift=shift)

    def _packed_weights(self, bits: int, group: int | None) -> PackedWeights:
        values_OJ, scales_OG = self._rows()
        zeros_OG = None if self._zeros_EOG is None else self._zeros_EOG.flatten(0, 1)
        return PackedWeights(values_OJ, scales_OG, zeros_OG, bits, group)

    def _coded_weights(self, table: Tensor | None, group: int) -> CodedWeights:
        codes_OJ, scales_OG = self._rows()
        factor_O = None if self._factor_EO is None else self._factor_EO.flatten()
        return CodedWeights(codes_OJ, table, scales_OG, factor_O, group)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Of all experts, one after another."""
        assert self._values_EOI is not None, "the loader fills every expert"
        assert self._scales is not None, "numbers of a few bits have scales"
        return self._values_EOI.flatten(0, 1), self._scales.flatten(0, 1)

    def _take_rounding(self, expert: int, matrix: QuantizedMatrix) -> None:
        """How inputs are rounded, all alike, as they are before they part."""
        scheme, rounding = matrix.scheme, matrix.scheme.rounding
        if matrix.form is not Form.SCALED:
            raise ModelLoadError(f"experts with {scheme.describe()} are not run on a GPU: give another checkpoint")
        self._block = None if scheme.block is None else scheme.block[1]
        if rounding is None:
            return
        if matrix.fixed is not None:
            if self._range is None:
                self._range = _SharedRange(matrix.fixed, self._num_experts)
            self._range.put(expert, matrix.fixed)
        self._rounded = KernelInputs(rounding, None if self._range is None else self._range.fixed)
        if (sums_O := row_sums(matrix.values_OI, rounding)) is not None:
            if self._sums_EO is None:
                self._sums_EO = sums_O.new_empty(self._num_experts, len(sums_O))
            self._sums_EO[expert].copy_(sums_O)


class _SharedRange:
    """Fixed scales of inputs that all experts read, which have each one's range within theirs."""

    __slots__ = ("_scales_E", "_zeros_E", "fixed")

    def __init__(self, first: FixedScale, num_experts: int) -> None:
        self._scales_E = first.scale.repeat(num_experts)
        self._zeros_E = None if first.zero is None else first.zero.repeat(num_experts)
        self.fixed = FixedScale(first.scale.clone(), None if first.zero is None else first.zero.clone())
        """That of all; it stays the same tensors."""

    def put(self, expert: int, fixed: FixedScale) -> None:
        """Another expert's range."""
        self._scales_E[expert].copy_(fixed.scale)
        if self._zeros_E is not None and fixed.zero is not None:
            self._zeros_E[expert].copy_(fixed.zero)
        self.join()

    @property
    def of_each(self) -> tuple[Tensor | None, ...]:
        """What `join` reads, by experts."""
        return self._scales_E, self._zeros_E

    def join(self) -> None:
        """Make `fixed` that of all again."""
        both = joined(self._scales_E, self._zeros_E)
        self.fixed.scale.copy_(both.scale)
        if self.fixed.zero is not None and both.zero is not None:
            self.fixed.zero.copy_(both.zero)
