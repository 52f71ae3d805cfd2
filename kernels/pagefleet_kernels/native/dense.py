"""Products on a CPU with a matrix in floats, which is laid out once for the processor's instruction set.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.library import Dense, Library, Product
from pagefleet_kernels.native.products import NativeProduct


def is_fastest(library: Library, dtype: torch.dtype) -> bool:
    """Whether these products are, of all that this processor has.

    oneDNN's are slow in bfloat16 where the processor does not multiply it; in float32 they were slower on AVX2.
    """
    if dtype == torch.bfloat16:
        return not library.multiplies_bf16
    return dtype == torch.float32 and library.instruction_set == "avx2"


def lay_out_dense(library: Library, weight_OI: Tensor) -> tuple[Tensor, Dense]:
    """A copy of a matrix in one of DTYPES as the kernels read it, uint8, and what it is; see dense.h."""
    weight_OI = weight_OI if weight_OI.stride(1) == 1 else weight_OI.contiguous()
    outputs, inputs = weight_OI.shape
    matrix = Dense(inputs=inputs, outputs=outputs, is_bf16=weight_OI.dtype == torch.bfloat16)
    packed = torch.empty(library.dense_bytes(matrix), dtype=torch.uint8)
    matrix.packed = packed.data_ptr()
    threads = torch.get_num_threads()
    library.lay_out_dense(byref(matrix), weight_OI.data_ptr(), weight_OI.stride(0), packed.data_ptr(), threads)
    return packed, matrix


class DenseProduct(NativeProduct):
    """Multiplies by one matrix; sums are float32."""

    __slots__ = ("_library", "_matrix", "_packed")

    def __init__(self, library: Library, weight_OI: Tensor) -> None:
        """`weight_OI`: in one of DTYPES; nothing of it is kept."""
        self._library = library
        self._packed, self._matrix = lay_out_dense(library, weight_OI)
        super().__init__(self._matrix.inputs, self._matrix.outputs)

    def _room(self, num_rows: int) -> int:
        return int(self._library.dense_room(self._matrix, num_rows))

    def _run(self, product: Product, memory: int | None, threads: int) -> None:
        if product.is_bf16 != self._matrix.is_bf16:
            raise UnsupportedShapeError("inputs are of another type than the matrix")
        self._library.run_dense(byref(self._matrix), byref(product), memory, threads)
