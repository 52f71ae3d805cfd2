"""Products of a few rows with a matrix in 16 bits, at the speed at which the matrix is read.

What follows the product, a residual sum or a gate, is done before anything is rounded to memory. Weights do not depend
on the kernel before, so that the first of them are read while that one still runs (`early_launch`). What that gave
on an H100 stands in docs/performance.md.

Shapes: T tokens, I inputs, O outputs, G gate width.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.activation import Kind, activate
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError

MAX_ROWS = 16
_FLOATS = (torch.bfloat16, torch.float16)
_TILE_OF_ONE = 4096
"""Weights that a program adds up at once for one row."""


def takes_few_rows(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether `few_rows_matmul` has a kernel for the product here."""
    return (
        0 < x_TI.shape[0] <= MAX_ROWS
        and x_TI.dtype in _FLOATS
        and x_TI.dtype == weight_OI.dtype
        and x_TI.stride(1) == weight_OI.stride(1) == 1
        and choose_backend(x_TI.device) == "triton"
    )


def few_rows_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    residual_TO: torch.Tensor | None = None,
    gate: Kind | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`x W^T + bias` of 1 to 16 rows in x's dtype; sums are float32.

    With a residual, of that shape and contiguous, the sum is left in it and returned. With a gate, whose rows are the
    first half of O, the result is `act(gate) * up`, [T, G], each rounded as separate operations would.
    """
    if not 0 < x_TI.shape[0] <= MAX_ROWS or x_TI.dim() != 2 or x_TI.shape[1] != weight_OI.shape[1]:
        raise UnsupportedShapeError(
            f"activations {list(x_TI.shape)} and weights {list(weight_OI.shape)} must be [T, I] and [O, I], T at most "
            f"{MAX_ROWS}"
        )
    if x_TI.dtype not in _FLOATS or x_TI.dtype != weight_OI.dtype or not x_TI.stride(1) == weight_OI.stride(1) == 1:
        raise UnsupportedShapeError(
            f"{x_TI.dtype} by {weight_OI.dtype} is not supported: both must be bfloat16 or float16, their last axis "
            "contiguous"
        )
    if residual_TO is not None and (gate is not None or not residual_TO.is_contiguous()):
        raise UnsupportedShapeError("a product takes a gate or a contiguous residual, not both")
    if choose_backend(x_TI.device, backend) == "torch":
        return reference.few_rows_matmul(x_TI, weight_OI, bias_O, residual_TO, gate)
    return _triton_matmul(x_TI, weight_OI, bias_O, residual_TO, gate)


def _triton_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    gate: Kind | None,
) -> torch.Tensor:
    (num_rows, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    width = num_outputs if gate is None else num_outputs // 2
    out = x_TI.new_empty((num_rows, width)) if residual_TO is None else residual_TO
    one = num_rows == 1
    if one:
        block_i = min(2048, next_power_of_2(num_inputs))
        block_o = max(1, _TILE_OF_ONE // block_i // (1 if gate is None else 2))
    else:
        block_i, block_o = 128, 64 if gate is None else 32
    kernel, early = _one_row_kernel if one else _few_rows_kernel, early_launch(x_TI.device)
    kernel[(-(-width // block_o),)](
        out,
        x_TI,
        weight_OI,
        out if bias_O is None else bias_O,
        num_rows,
        x_TI.stride(0),
        weight_OI.stride(0),
        OUTPUTS=width,
        INPUTS=num_inputs,
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_TO is not None,
        GATED=gate is not None,
        KIND=gate or "silu",
        IEEE=INTERPRETED,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        STAGES=6 if early["EARLY"] and not one else 4,  # Hopper has room for more
        num_warps=4,
        **early,
        **COMPILE_OPTIONS,
    )
    return out


@jit()
def _finish(  # type: ignore[no-untyped-def]
    sums,
    up_sums,
    bias_ptr,
    out_ptr,
    at,
    column,
    mask,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """What follows the sums, to the output at `at`."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        sums += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up_sums += tl.load(bias_ptr + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)
        active = activate(sums.to(dtype).to(tl.float32), KIND)
        sums = active.to(dtype).to(tl.float32) * up_sums.to(dtype).to(tl.float32)
    tl.store(out_ptr + at, sums.to(dtype), mask=mask)


@jit(do_not_specialize=("num_rows",))
def _one_row_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    stride_x,
    stride_weight,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    IEEE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per BLOCK_O outputs, or pairs of gate and up: every weight is read once, and nothing else is much."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_I)
    inside = (o < OUTPUTS)[:, None]
    tile_ptr = weight_ptr + o.to(tl.int64)[:, None] * stride_weight + k[None, :]
    up_ptr = tile_ptr + OUTPUTS * stride_weight
    mask = inside & (k < INPUTS)[None, :]
    weight = tl.load(tile_ptr, mask=mask, other=0.0)
    if GATED:
        up_weight = tl.load(up_ptr, mask=mask, other=0.0)
    wait_for_inputs(EARLY)
    x = tl.load(x_ptr + k, mask=k < INPUTS, other=0.0).to(tl.float32)[None, :]
    sums = weight.to(tl.float32) * x
    up_sums = sums
    if GATED:
        up_sums = up_weight.to(tl.float32) * x
    for start in tl.range(BLOCK_I, INPUTS, BLOCK_I, num_stages=STAGES):
        inside_k = k < INPUTS - start
        x = tl.load(x_ptr + start + k, mask=inside_k, other=0.0).to(tl.float32)[None, :]
        mask = inside & inside_k[None, :]
        sums += tl.load(tile_ptr + start, mask=mask, other=0.0).to(tl.float32) * x
        if GATED:
            up_sums += tl.load(up_ptr + start, mask=mask, other=0.0).to(tl.float32) * x
    total = tl.sum(sums, axis=1)
    up_total = total
    if GATED:
        up_total = tl.sum(up_sums, axis=1)
    _finish(total, up_total, bias_ptr, out_ptr, o, o, o < OUTPUTS, OUTPUTS, HAS_BIAS, HAS_RESIDUAL, GATED, KIND)


@jit(do_not_specialize=("num_rows",))
def _few_rows_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    stride_x,
    stride_weight,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    IEEE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The same on tensor cores, outputs as the rows of the product: up to sixteen tokens are its columns."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, 16)
    k = tl.arange(0, BLOCK_I)
    inside_o, inside_t = (o < OUTPUTS)[:, None], (t < num_rows)[None, :]
    tile_ptr = weight_ptr + o.to(tl.int64)[:, None] * stride_weight + k[None, :]
    up_ptr = tile_ptr + OUTPUTS * stride_weight
    x_tile_ptr = x_ptr + t.to(tl.int64)[None, :] * stride_x + k[:, None]
    sums = tl.zeros((BLOCK_O, 16), tl.float32)
    up_sums = sums
    wait_for_inputs(EARLY)
    for start in tl.range(0, INPUTS, BLOCK_I, num_stages=STAGES):
        inside_k = k < INPUTS - start
        x = tl.load(x_tile_ptr + start, mask=inside_k[:, None] & inside_t, other=0.0)
        weight = tl.load(tile_ptr + start, mask=inside_o & inside_k[None, :], other=0.0)
        if IEEE:  # the interpreter would multiply the bit patterns of bfloat16
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        sums = tl.dot(weight, x, sums)
        if GATED:
            up_weight = tl.load(up_ptr + start, mask=inside_o & inside_k[None, :], other=0.0)
            if IEEE:
                up_weight = up_weight.to(tl.float32)
            up_sums = tl.dot(up_weight, x, up_sums)
    at = t.to(tl.int64)[None, :] * OUTPUTS + o[:, None]
    column, mask = o[:, None], inside_o & inside_t
    _finish(sums, up_sums, bias_ptr, out_ptr, at, column, mask, OUTPUTS, HAS_BIAS, HAS_RESIDUAL, GATED, KIND)
