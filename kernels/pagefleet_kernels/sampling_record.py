"""Where sampled tokens go, so that the next step finds them on the device: the tokens of their slot, and its counts.

Shapes: R rows, V vocabulary, S slots, L tokens per slot, P rows of counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagefleet_kernels._triton import jit, tl


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """Tensors that take the token of each row."""

    tokens_SL: Tensor
    """int32, rows contiguous: a row's token is written to `[slot, len]`, where that is inside."""
    slots_R: Tensor
    """int64, distinct."""
    counts_PV: Tensor | None = None
    """int32, contiguous: 2 is added at a row's token (see `sampling_edits`)."""
    count_row_R: Tensor | None = None
    """int64, each row's place in `counts_PV`, -1 where it has none; given with it."""

    def kernel_arguments(self, vocab_size: int) -> tuple[Tensor | int, ...]:
        """Arguments of `record_token` that are the same for all rows; without counts, stand-ins of their types."""
        counts_PV = self.tokens_SL if self.counts_PV is None else self.counts_PV
        count_row_R = self.slots_R if self.count_row_R is None else self.count_row_R
        stride, max_len = self.tokens_SL.stride(0), self.tokens_SL.shape[1]
        return self.tokens_SL, self.slots_R, counts_PV, count_row_R, stride, max_len, vocab_size


@jit()
def record_token(  # type: ignore[no-untyped-def]
    token,
    row,
    lens_ptr,
    tokens_ptr,
    slots_ptr,
    counts_ptr,
    count_row_ptr,
    stride_slot,
    max_len,
    vocab_size,
    COUNTED: tl.constexpr,
):
    """Write one row's token; a negative one is nowhere recorded."""
    length = tl.load(lens_ptr + row)
    slot = tl.load(slots_ptr + row)
    tl.store(tokens_ptr + slot * stride_slot + length, token, mask=(token >= 0) & (length < max_len))
    if COUNTED:
        count_row = tl.load(count_row_ptr + row)
        if (count_row >= 0) & (token >= 0):
            count_ptr = counts_ptr + count_row * vocab_size + token
            tl.store(count_ptr, tl.load(count_ptr) + 2)
