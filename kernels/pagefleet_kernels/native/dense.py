"""Products on a CPU with a matrix in floats, which is laid out once for the processor's instruction set.

Shapes: T rows, I inputs, O outputs, N heads.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.library import Dense, Library, Product
from pagefleet_kernels.native.products import NativeProduct, threads_for


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
        self._library.run_dense(byref(self._matrix), 1, byref(product), 0, 0, memory, threads)


class HeadProducts:
    """Multiplies each head's rows by a matrix of its own; sums are float32."""

    __slots__ = ("_dtype", "_first", "_kept", "_library", "_shape")

    def __init__(self, library: Library, weights_NOI: Tensor) -> None:
        """`weights_NOI`: in one of DTYPES; nothing of it is kept."""
        self._library, self._shape, self._dtype = library, weights_NOI.shape, weights_NOI.dtype
        laid_out = [lay_out_dense(library, weight_OI) for weight_OI in weights_NOI]
        self._kept = [packed for packed, _ in laid_out]
        self._first: Dense = (Dense * len(laid_out))(*(matrix for _, matrix in laid_out))[0]  # keeps those after it

    def __call__(self, x_NTI: Tensor, out_NTO: Tensor) -> None:
        """Fill `out`; of both the last axis is contiguous, and their type is that of the matrices."""
        heads, outputs, inputs = self._shape
        rows = x_NTI.shape[1]
        fits = x_NTI.shape == (heads, rows, inputs) and out_NTO.shape == (heads, rows, outputs)
        is_of_type = x_NTI.dtype == out_NTO.dtype == self._dtype
        if not fits or not is_of_type or (x_NTI.stride(2), out_NTO.stride(2)) != (1, 1):
            raise UnsupportedShapeError(
                f"{x_NTI.dtype} {list(x_NTI.shape)} to {list(out_NTO.shape)} are not for {heads} matrices of "
                f"{outputs} x {inputs}"
            )
        if not rows:
            return
        product = Product(
            x=x_NTI.data_ptr(),
            out=out_NTO.data_ptr(),
            x_stride=x_NTI.stride(1),
            out_stride=out_NTO.stride(1),
            rows=rows,
            is_bf16=self._first.is_bf16,
        )
        memory = torch.empty(self._library.dense_room(self._first, heads * rows), dtype=torch.uint8)
        threads = threads_for(heads * rows * inputs * outputs)
        steps = x_NTI.stride(0), out_NTO.stride(0)
        self._library.run_dense(byref(self._first), heads, byref(product), *steps, memory.data_ptr(), threads)
