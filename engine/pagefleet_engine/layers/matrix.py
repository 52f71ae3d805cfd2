"""A linear layer's matrix, from the slots that the checkpoint fills to the kernel that multiplies by it.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import LinearKernel, PlainLinear, is_laid_out, linear_kernel
from pagefleet_engine.layers.observed import ObservedLinear
from pagefleet_engine.layers.quantization.block_slots import BlockSlots
from pagefleet_engine.layers.quantization.coded import CodedMatrix, CodedSlots
from pagefleet_engine.layers.quantization.form import Form, form_of
from pagefleet_engine.layers.quantization.inputs import InputQuantizer
from pagefleet_engine.layers.quantization.kernels import ExpandedLinear
from pagefleet_engine.layers.quantization.packed import PackedMatrix
from pagefleet_engine.layers.quantization.packed_slots import PackedSlots
from pagefleet_engine.layers.quantization.slots import QuantizedSlots
from pagefleet_engine.layers.quantization_scheme import BlockScheme, CodedScheme, PackedScheme
from pagefleet_engine.layers.shard import Shard, shard_of
from pagefleet_engine.layers.weight import Kept, Placement, Weight


class Matrix(Protocol):
    """A matrix that has arrived."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """Its rows from `start` to before `stop`, ready to be applied."""
        ...

    def plain(self) -> Tensor:
        """The numbers that it stands for, [O, I] in the model's type; memory of its own."""
        ...

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """All that it consists of."""
        ...

    def of(self, stored: Sequence[Tensor]) -> Matrix:
        """A matrix of the same form and shape that consists of these."""
        ...


class PlainMatrix:
    """A matrix in the model's own type."""

    __slots__ = ("_kernel_of", "_see", "inputs", "weight_OI")

    def __init__(
        self,
        weight_OI: Tensor,
        kernel_of: Callable[[Tensor], LinearKernel] = linear_kernel,
        inputs: InputQuantizer | None = None,
        see: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`see`: is told what all rows multiply, see ObservedLinear."""
        self.weight_OI, self._kernel_of, self._see = weight_OI, kernel_of, see
        self.inputs = inputs
        """What rounds the inputs of its products."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix."""
        product = self._kernel_of(self.weight_OI[start:stop])
        if self._see is not None and start == 0:  # parts read the same inputs: the first alone tells of them
            product = ObservedLinear(product, self._see)
        return product if self.inputs is None else ExpandedLinear(product, self.inputs)

    def plain(self) -> Tensor:
        """See Matrix."""
        return self.weight_OI.clone()

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        return (self.weight_OI,)

    def of(self, stored: Sequence[Tensor]) -> PlainMatrix:
        """See Matrix."""
        return PlainMatrix(stored[0], self._kernel_of, self.inputs, self._see)


def kernels_of(placement: Placement) -> Callable[[Tensor], LinearKernel]:
    """What multiplies by plain matrices there."""
    return PlainLinear if placement.traceable else partial(linear_kernel, native=placement.native)


def matrix_slots(
    inputs: int | Shard, outputs: tuple[int | Shard, ...], placement: Placement, install: Callable[[Matrix], None]
) -> dict[str, Weight]:
    """Slots of the layer at `placement.path`, by name; `install` gets the matrix once, when all of them are full.

    `outputs`: rows of each stacked projection, in order. A rank's matrix is the rows and columns that are its own.

    Raises:
        ModelLoadError: the matrix is quantized, and transposed; or ranks cannot divide it.
    """
    slots = _matrix_slots(inputs, outputs, placement, install)
    if not placement.transposed:
        return slots
    if len(slots) > 1:
        raise ModelLoadError(f"{placement.path} is quantized with a row for each input: give it in a float type")
    return {name: transposed(slot, placement) for name, slot in slots.items()}


def transposed(slot: Weight, placement: Placement) -> Weight:
    """A slot for the checkpoint's tensor [I, O], which fills `slot` with what that needs of it."""
    outputs, inputs = slot.stored_shapes[0]
    kept = Kept(slot.kept.dtype, is_copy=True)
    return Weight((inputs,), outputs, placement, lambda w_IO: slot.fill(0, w_IO.t()), dtype=slot.dtype, kept=kept)


def _matrix_slots(
    inputs: int | Shard, outputs: tuple[int | Shard, ...], placement: Placement, install: Callable[[Matrix], None]
) -> dict[str, Weight]:
    scheme, rows = placement.scheme(len(outputs)), tuple(map(shard_of, outputs))
    if isinstance(scheme, BlockScheme):
        if form_of(scheme, inputs, placement)[0] is not Form.EXPANDED:
            return dict(BlockSlots(scheme, shard_of(inputs), rows, placement, install).slots)
        scheme = None  # blocks become numbers as they are read
    if isinstance(scheme, PackedScheme):
        columns = shard_of(inputs)
        ranks = placement.tensor if columns.is_part else None
        rounded = None if scheme.inputs is None else InputQuantizer(scheme.inputs, None, ranks)

        def take_packed(matrix: PackedMatrix | Tensor) -> None:
            install(PlainMatrix(matrix, kernels_of(placement), rounded) if isinstance(matrix, Tensor) else matrix)

        return dict(PackedSlots(scheme, columns, rows, placement, take_packed).slots)
    if isinstance(scheme, CodedScheme):

        def take_coded(matrix: CodedMatrix | Tensor) -> None:
            install(PlainMatrix(matrix, kernels_of(placement)) if isinstance(matrix, Tensor) else matrix)

        return dict(CodedSlots(scheme, shard_of(inputs), rows, placement, take_coded).slots)
    if scheme is not None:
        return dict(QuantizedSlots(scheme, shard_of(inputs), rows, placement, install).slots)

    def take(weight_OI: Tensor) -> None:
        observer = placement.observer
        see = None if observer is None else observer.watch(placement.part_names(len(outputs)))
        install(PlainMatrix(weight_OI, kernels_of(placement), see=see))

    is_packed = not placement.traceable and is_laid_out(placement.dtype, placement.device, placement.native)
    return {"weight": Weight(outputs, inputs, placement, take, kept=Kept(placement.dtype, is_copy=is_packed))}
