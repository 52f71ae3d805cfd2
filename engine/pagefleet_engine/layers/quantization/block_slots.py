"""A matrix in GGUF's blocks, as kernels multiply it, and the slot that its bytes arrive in.

Shapes: T tokens, I inputs, O outputs, G groups, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

import torch
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.native.blocks import KINDS, lay_out_blocks
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct
from pagefleet_kernels.packed_matmul import PackedWeights, pack_numbers
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.gguf.blocks import BY_NAME, BlockType
from pagefleet_engine.layers.linear_kernel import LinearKernel
from pagefleet_engine.layers.quantization.coded import CodedMatrix
from pagefleet_engine.layers.quantization.kernels import NativeLinear, QuantizedLinear
from pagefleet_engine.layers.quantization.packed import PackedMatrix
from pagefleet_engine.layers.quantization_scheme import BlockScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Content, Kept, Placement, UnusableTensorError, Weight

_NUMBERS_AT_ONCE = 1 << 20
ZEROS = Content(lambda _: None, lambda shape: torch.zeros(shape, dtype=torch.uint8))
"""What blocks hold in a model of random weights, as not all bytes are numbers."""
_NOT_FINITE = "holds a scale that is no finite number: download the file again"


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """Implements `layers.matrix.Matrix` on a CPU, by the file's bytes, as long as these are there."""

    bytes_OJ: Tensor
    kind: BlockType
    dtype: torch.dtype
    """Of the model."""
    native: Library
    """Who multiplies."""

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix; the kernel has memory of its own.

        Raises:
            UnusableTensorError: a scale is no finite number.
        """
        matrix = lay_out_blocks(self.native, KINDS[self.kind.name], self.bytes_OJ[start:stop])
        if matrix is None:
            raise UnusableTensorError(_NOT_FINITE)
        return NativeLinear(PackedProduct(self.native, matrix))

    def plain(self) -> Tensor:
        """See Matrix.

        Raises:
            UnusableTensorError: a scale is no finite number.
        """
        numbers = self.kind.decode(self.bytes_OJ.reshape(-1, self.kind.num_bytes))
        if not numbers.isfinite().all():
            raise UnusableTensorError(_NOT_FINITE)
        return numbers.view(len(self.bytes_OJ), -1).to(self.dtype)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        return (self.bytes_OJ,)

    def of(self, stored: Sequence[Tensor]) -> BlockMatrix:
        """See Matrix."""
        return replace(self, bytes_OJ=stored[0])


PartMatrix = PackedMatrix | CodedMatrix | BlockMatrix


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """Implements `layers.matrix.Matrix` by several, one after another, whose numbers are of different bits."""

    parts: tuple[PartMatrix, ...]

    def kernel(self, start: int, stop: int) -> LinearKernel:
        """See Matrix."""
        found: list[LinearKernel] = []
        bounds = accumulate((len(part.stored[0]) for part in self.parts), initial=0)
        for part, (first, last) in zip(self.parts, pairwise(bounds), strict=True):
            own = max(start, first), min(stop, last)
            if own[0] < own[1]:
                found.append(part.kernel(own[0] - first, own[1] - first))
        return found[0] if len(found) == 1 else StackedLinear(tuple(found))

    def plain(self) -> Tensor:
        """See Matrix."""
        return torch.cat([part.plain() for part in self.parts])

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """See Matrix."""
        return tuple(tensor for part in self.parts for tensor in part.stored)

    def of(self, stored: Sequence[Tensor]) -> StackedMatrix:
        """See Matrix."""
        left, parts = list(stored), list[PartMatrix]()
        for part in self.parts:
            count = len(part.stored)
            parts.append(part.of(left[:count]))
            left = left[count:]
        return replace(self, parts=tuple(parts))


BlocksMatrix = PartMatrix | StackedMatrix


class StackedLinear(QuantizedLinear):
    """Several products of the same inputs, side by side."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: tuple[LinearKernel, ...]) -> None:
        self._kernels = kernels

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """See LinearKernel."""
        out_TO = torch.cat([kernel.linear(x_TI, None) for kernel in self._kernels], -1)
        return out_TO if bias_O is None else out_TO.add_(bias_O)


class BlockSlots:
    """Takes the bytes of all projections, and installs the matrix."""

    __slots__ = ("_install", "_kinds", "_placement", "slots")

    def __init__(
        self,
        scheme: BlockScheme,
        inputs: Shard,
        outputs: tuple[Shard, ...],
        placement: Placement,
        install: Callable[[BlocksMatrix], None],
    ) -> None:
        """See `layers.matrix.matrix_slots`.

        Raises:
            ModelLoadError: ranks would cut blocks.
        """
        self._kinds = kinds = tuple(BY_NAME[kind] for kind in scheme.types)
        self._placement, self._install = placement, install
        try:
            columns = tuple(inputs.in_blocks_of(kind.numbers).times(kind.num_bytes) for kind in kinds)
        except ValueError:
            raise ModelLoadError(
                f"{placement.path} is in blocks of {max(kind.numbers for kind in kinds)} numbers, which "
                f"{placement.tensor.size} ranks would cut: give a smaller --tensor-parallel-size"
            ) from None
        kept = max(
            Fraction(kind.gpu_bytes if placement.use_kernels else kind.cpu_bytes, kind.num_bytes) for kind in kinds
        )
        slot = Weight(outputs, columns, placement, self._take, dtype=torch.uint8, kept=Kept(torch.uint8, True, kept))
        self.slots = {"weight": slot.holding(ZEROS)}  # scales are checked as they are laid out

    def _take(self, whole: Tensor) -> None:
        if len(set(self._kinds)) == 1:
            self._install(self._matrix(whole, self._kinds[0]))
            return
        parts = self.slots["weight"].parts(whole)
        self._install(StackedMatrix(tuple(map(self._matrix, parts, self._kinds))))

    def _matrix(self, bytes_OJ: Tensor, kind: BlockType) -> PartMatrix:
        place = self._placement
        native = None if place.use_kernels else place.native
        assert place.use_kernels or native is not None, "the form is theirs"
        if native is not None and kind.name in KINDS:
            return BlockMatrix(bytes_OJ, kind, place.dtype, native)
        weights = packed_weights(bytes_OJ, kind)
        if isinstance(weights, CodedWeights):
            return CodedMatrix(weights, place.dtype, native)
        return PackedMatrix(weights, None, place.dtype, native=native)


def packed_weights(bytes_OJ: Tensor, kind: BlockType) -> PackedWeights | CodedWeights:
    """The same numbers in 4 or 8 bits.

    Raises:
        UnusableTensorError: a scale is no finite number.
    """
    assert kind.split is not None, "plain numbers have no scales"
    num_outputs, bits, group = len(bytes_OJ), kind.gpu_bits, kind.group
    num_inputs = bytes_OJ.shape[1] // kind.num_bytes * kind.numbers
    numbers = torch.empty((num_outputs, num_inputs * bits // 8), dtype=torch.uint8, device=bytes_OJ.device)
    scales, offsets, table = list[Tensor](), list[Tensor](), None
    at_once = max(1, _NUMBERS_AT_ONCE // num_inputs)
    for start in range(0, num_outputs, at_once):
        rows = bytes_OJ[start : start + at_once]
        parts = kind.split(rows.reshape(-1, kind.num_bytes))
        codes_BN, table = parts.codes_BN, parts.table
        if codes_BN.dtype == torch.int8:  # around zero becomes around the middle
            codes_BN = (codes_BN + (1 << (bits - 1)) if bits < 8 else codes_BN ^ -128).view(torch.uint8)
        numbers[start : start + at_once] = pack_numbers(codes_BN.view(len(rows), num_inputs), bits)
        scales.append(parts.scales_BG.view(len(rows), -1))
        if parts.offsets_BG is not None:
            offsets.append(parts.offsets_BG.view(len(rows), -1))
    scales_OG = torch.cat(scales)
    offsets_OG = torch.cat(offsets) if offsets else None
    if not all(bool(part.isfinite().all()) for part in (scales_OG, *offsets)):
        raise UnusableTensorError(_NOT_FINITE)
    if table is not None:
        return CodedWeights(numbers, table, scales_OG, None, group)
    return PackedWeights(numbers, scales_OG, None, bits, group, offsets_OG)
