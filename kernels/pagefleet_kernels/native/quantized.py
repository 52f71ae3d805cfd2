"""Products on a CPU with a matrix in numbers of 4, 6 or 8 bits, by inputs that are rounded to 8 bits on the way.

Codes of 4 bits stand for numbers of 8: twice those of e2m1, exactly; for bitsandbytes' floats, the nearest.

Shapes: T rows, I inputs, O outputs, G groups, B blocks of inputs, S strips of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from ctypes import byref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.mxfp4 import E2M1
from pagefleet_kernels.native.library import Library, Packed, Product
from pagefleet_kernels.native.products import NativeProduct
from pagefleet_kernels.packed_matmul import PackedWeights, unpack_numbers

STEP = 16
"""Inputs that a group is a multiple of."""
INPUT_BLOCK = 32
"""Inputs of a row that are rounded together, unless groups are of fewer."""
LARGEST = 127.0
SMALLEST_SCALE = 1e-12
LONGEST_BLOCK = 1 << 16
"""Inputs whose products' sum fits 32 bits."""
STRIP = 64
"""Outputs that lie beside each other."""
MIDDLE, POINTS, OFFSETS = range(3)

_SMALLEST_FACTOR = 2.0**-100
_ZERO = 128
"""Of a table's bytes."""
_SMALLEST_UNITS = 64
"""That a table's largest float becomes, at least."""


def takes_packed(num_inputs: int, group: int | None) -> bool:
    """Whether the kernels are for such groups; None: one for each row."""
    size = num_inputs if group is None else group
    return size % STEP == 0 and num_inputs % size == 0 and (group is not None or num_inputs <= LONGEST_BLOCK)


class LaidOut(NamedTuple):
    """A matrix as quantized.cpp reads it."""

    row_scales_O: Tensor
    """float32"""
    packed: Tensor
    """uint8"""
    inputs: int
    bits: int
    group: int
    zeros: int
    """How it has its zeros."""
    table: Tensor | None = None
    """uint8 [16], where numbers are codes."""
    shared: int = 0
    """Inputs whose groups share a scale of 16 bits and have their own in 8; 0: groups have theirs in 16."""


class PackedProduct(NativeProduct):
    """Multiplies by one matrix in few bits, which is laid out anew unless it is so already."""

    __slots__ = ("_library", "kept", "matrix")

    def __init__(
        self, library: Library, weights: PackedWeights | CodedWeights | LaidOut, *, input_block: int | None = None
    ) -> None:
        """Groups as `takes_packed` says. `input_block`: inputs that are rounded together, a divisor of the group; where
        groups share scales, all that do.

        Raises:
            UnsupportedShapeError: the kernels do not take such groups, or blocks.
        """
        if isinstance(weights, CodedWeights):
            matrix = lay_out_codes(weights)
        else:
            matrix = weights if isinstance(weights, LaidOut) else lay_out(weights)
        block = matrix.shared or input_block or input_block_of(matrix.group)
        if not matrix.shared and (matrix.group % block or block % STEP):
            raise UnsupportedShapeError(
                f"groups of {matrix.group} inputs, {block} rounded together, are not supported: multiples of {STEP} "
                "that divide each other are"
            )
        self._library = library
        kept = (matrix.packed, matrix.row_scales_O)
        self.kept: tuple[Tensor, ...] = kept if matrix.table is None else (*kept, matrix.table)
        """All that the matrix is in memory."""
        self.matrix = Packed(
            packed=matrix.packed.data_ptr(),
            row_scales=matrix.row_scales_O.data_ptr(),
            table=None if matrix.table is None else matrix.table.data_ptr(),
            inputs=matrix.inputs,
            outputs=len(matrix.row_scales_O),
            bits=matrix.bits,
            group=matrix.group,
            zeros=matrix.zeros,
            input_block=block,
            shared=matrix.shared,
        )
        super().__init__(matrix.inputs, len(matrix.row_scales_O))

    def of(self, kept: Sequence[Tensor]) -> PackedProduct:
        """A product like this one, of what another `kept`."""
        other = copy(self)
        other.kept, other.matrix = tuple(kept), Packed.from_buffer_copy(self.matrix)
        other.matrix.packed, other.matrix.row_scales = kept[0].data_ptr(), kept[1].data_ptr()
        other.matrix.table = None if self.matrix.table is None else kept[2].data_ptr()
        return other

    @property
    def nbytes(self) -> int:
        """That the matrix takes."""
        return sum(part.nbytes for part in self.kept)

    def _room(self, num_rows: int) -> int:
        return int(self._library.product_room(self.matrix, num_rows))

    def _run(self, product: Product, memory: int | None, threads: int) -> None:
        self._library.run_product(byref(self.matrix), byref(product), memory, threads)


def input_block_of(group: int) -> int:
    """Inputs that are rounded together in groups of that size."""
    return INPUT_BLOCK if group % INPUT_BLOCK == 0 else STEP


def lay_out(weights: PackedWeights) -> LaidOut:
    """The same matrix.

    Scales of groups and offsets are kept in 16 bits, less a power of two of each row: those that a checkpoint has in 16
    bits stay as they are; others are rounded to 11 digits.

    Raises:
        UnsupportedShapeError: the kernels do not take such groups.
    """
    group = _checked_group(weights)
    scales_OG, offsets_OG = weights.scales_OG.to(torch.float32), weights.offsets_OG
    if weights.zeros_OG is not None and weights.zeros_OG.is_floating_point():
        offsets_OG = weights.zeros_OG * scales_OG
    if weights.group is None and offsets_OG is None:
        factors_O = scales_OG[:, 0].contiguous()
        shared_OG = torch.ones_like(scales_OG)
    else:
        most_O = scales_OG.abs().amax(1)
        if offsets_OG is not None:  # which have to fit beside it in 16 bits
            most_O = torch.maximum(most_O, offsets_OG.abs().amax(1).to(torch.float32) / 2**14)
        factors_O = _powers_of_two(most_O)
        shared_OG = scales_OG / factors_O[:, None]
    headers, zeros = [_in_strips(shared_OG.to(torch.float16))], MIDDLE
    if offsets_OG is not None:
        headers.append(_in_strips((offsets_OG.to(torch.float32) / factors_O[:, None]).to(torch.float16)))
        zeros = OFFSETS
    elif weights.zeros_OG is not None:
        headers.append(_in_strips(weights.zeros_OG))
        zeros = POINTS
    packed = _in_groups(unpack_numbers(weights.numbers, weights.bits), weights.bits, headers)
    return LaidOut(factors_O, packed, weights.num_inputs, weights.bits, group, zeros)


def lay_out_codes(weights: CodedWeights) -> LaidOut:
    """The same of a matrix in codes."""
    group, scales_OG = _checked_group(weights), weights.plain_scales()
    numbers, unit = byte_table(weights.table)
    factors_O = _powers_of_two(scales_OG.abs().amax(1))
    shared_OG = (scales_OG / factors_O[:, None]).to(torch.float16)
    packed = _in_groups(unpack_numbers(weights.codes, 4), 4, [_in_strips(shared_OG)])
    row_scales_O = factors_O.mul_(unit) if weights.factor_O is None else factors_O.mul_(unit).mul_(weights.factor_O)
    table = (numbers + _ZERO).to(torch.uint8)
    return LaidOut(row_scales_O, packed, weights.num_inputs, 4, group, MIDDLE, table)


def byte_table(table: Tensor | None) -> tuple[Tensor, float]:
    """int16 [16] of numbers in 8 bits, and what 1 of them stands for; the table is as in `CodedWeights`.

    Among the sizes that the largest may have, the one with which all are nearest to the floats that are meant.
    """
    if table is None:
        return torch.tensor([2 * value for value in E2M1], dtype=torch.int16), 0.5
    units_N1 = torch.arange(_SMALLEST_UNITS, int(LARGEST) + 1)[:, None] / table.abs().max()
    numbers_NV = (table * units_N1).round()
    best = (numbers_NV / units_N1 - table).square().sum(1).argmin()
    return numbers_NV[best].to(torch.int16), float(1 / units_N1[best])


def _checked_group(weights: PackedWeights | CodedWeights) -> int:
    group = weights.group or weights.num_inputs
    if not takes_packed(weights.num_inputs, weights.group):
        raise UnsupportedShapeError(
            f"groups of {group} of {weights.num_inputs} inputs are not supported: multiples of {STEP} that divide "
            "these are"
        )
    return group


def _in_groups(numbers_OI: Tensor, bits: int, headers: list[Tensor]) -> Tensor:
    """uint8: of each strip group after group, headers [S, G, bytes] before numbers."""
    codes_SGJ = _codes(_whole_strips(numbers_OI), bits).view(*headers[0].shape[:2], -1)
    return torch.cat((*headers, codes_SGJ), 2).flatten()


def _codes(numbers_OI: Tensor, bits: int) -> Tensor:
    """uint8 [S, J]: of a strip four inputs of each output after each other, or eight in as many bytes."""
    if bits == 4:
        lower, upper = numbers_OI.view(len(numbers_OI), -1, 2, 4).unbind(2)
        numbers_OI = (lower | upper << 4).flatten(1)
    words_SOW = numbers_OI.contiguous().view(torch.int32).view(-1, STRIP, numbers_OI.shape[1] // 4)
    return words_SOW.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _in_strips(shared_OG: Tensor) -> Tensor:
    """uint8 [S, G, bytes of a strip's outputs]."""
    strips_SOG = _whole_strips(shared_OG).view(-1, STRIP, shared_OG.shape[1])
    return strips_SOG.transpose(1, 2).contiguous().view(torch.uint8)


def _whole_strips(of_rows: Tensor) -> Tensor:
    return F.pad(of_rows, (0, 0, 0, -len(of_rows) % STRIP))


def _powers_of_two(most_O: Tensor) -> Tensor:
    """Not above each; 1 for zero."""
    exponents_O = torch.frexp(most_O)[1] - 1
    return torch.where(most_O > 0.0, torch.exp2(exponents_O.float()), 1.0).clamp_(min=_SMALLEST_FACTOR)


def reference_product(
    x_TI: Tensor,
    weights: PackedWeights | CodedWeights,
    bias_O: Tensor | None = None,
    *,
    input_block: int | None = None,
    scales_T: Tensor | None = None,
) -> Tensor:
    """What `PackedProduct` gives, by torch: float32 [T, O]."""
    block = input_block or input_block_of(weights.group or weights.num_inputs)
    blocks_TBi = x_TI.float().view(len(x_TI), -1, block)
    if scales_T is None:
        scales = blocks_TBi.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=SMALLEST_SCALE)
    else:
        scales = scales_T.view(-1, 1, 1)
    rounded_TI = (blocks_TBi / scales).clamp_(-LARGEST, LARGEST).round_().mul_(scales).flatten(1)
    out_TO = rounded_TI @ weights.dequantize().t()
    return out_TO if bias_O is None else out_TO + bias_O.float()
