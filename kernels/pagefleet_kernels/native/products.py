"""What all products of compiled kernels have in common: what follows them, and how many threads they are worth.

Shapes: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.library import Product

Then = Literal["nothing", "add", "multiply", "silu", "gelu_tanh", "relu"]
_THEN: Mapping[Then, int] = {"nothing": 0, "add": 1, "multiply": 2, "silu": 3, "gelu_tanh": 4, "relu": 5}
ACTIVATIONS: tuple[Then, ...] = ("silu", "gelu_tanh", "relu")

OWN_ROOM = 1 << 15
"""Bytes that a kernel has on its stack, where it is given no memory; see kernels.h."""
_WORTH_A_THREAD = 1 << 18
"""Products of two numbers that one thread computes sooner than another wakes."""


def threads_for(work: int) -> int:
    """How many are worth their waking for so many products of two numbers."""
    return min(torch.get_num_threads(), 1 + work // _WORTH_A_THREAD)


class NativeProduct(ABC):
    """Multiplies by one matrix [O, I]; sums are float32."""

    __slots__ = ("_inputs", "_outputs", "_room_of_row")

    def __init__(self, inputs: int, outputs: int) -> None:
        """Called when the matrix is there."""
        self._inputs, self._outputs = inputs, outputs
        self._room_of_row = self._room(1)

    def __call__(
        self,
        x_TI: Tensor,
        bias_O: Tensor | None = None,
        *,
        then: Then = "nothing",
        other_TO: Tensor | None = None,
        out_TO: Tensor | None = None,
        scales_T: Tensor | None = None,
    ) -> Tensor:
        """`x W^T + bias`, and `then` that of it, [T, O] in x's type, which is one of DTYPES.

        `other_TO`: what is added or multiplied, in x's type; `out_TO` may be the same. `scales_T`: float32, what 1 of a
        row's rounded inputs stands for where a matrix has them rounded, which are then rounded as a row.
        """
        if x_TI.dtype not in DTYPES or x_TI.dim() != 2 or x_TI.shape[1] != self._inputs:
            raise UnsupportedShapeError(
                f"inputs {list(x_TI.shape)} of {x_TI.dtype} are not float32 or bfloat16 [T, {self._inputs}]"
            )
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_rows = x_TI.shape[0]
        out_TO = x_TI.new_empty((num_rows, self._outputs)) if out_TO is None else out_TO
        if not num_rows:
            return out_TO
        bias_O = None if bias_O is None else bias_O.to(x_TI.dtype).contiguous()
        scales_T = None if scales_T is None else scales_T.to(torch.float32).contiguous()
        one = num_rows == 1  # in decoding each call of torch counts
        product = Product(  # its fields in order, as names take longer
            x_TI.data_ptr(),
            out_TO.data_ptr(),
            None if other_TO is None else other_TO.data_ptr(),
            None if bias_O is None else bias_O.data_ptr(),
            None if scales_T is None else scales_T.data_ptr(),
            0 if one else x_TI.stride(0),
            0 if one else out_TO.stride(0),
            0 if one or other_TO is None else other_TO.stride(0),
            num_rows,
            _THEN[then],
            x_TI.dtype == torch.bfloat16,
        )
        threads = threads_for(num_rows * self._inputs * self._outputs)
        if one and self._room_of_row <= OWN_ROOM:
            self._run(product, None, threads)
        else:
            memory = torch.empty(self._room(num_rows), dtype=torch.uint8)
            self._run(product, memory.data_ptr(), threads)
        return out_TO

    @abstractmethod
    def _room(self, num_rows: int) -> int:
        """Return the bytes that a product of so many rows needs meanwhile."""

    @abstractmethod
    def _run(self, product: Product, memory: int | None, threads: int) -> None: ...
