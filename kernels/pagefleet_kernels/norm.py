"""RMSNorm, alone and fused with the residual addition before it.

Shapes: T tokens, H heads, D normalised width. Rounding follows the Llama code of Hugging Face: normalise in float32,
round to the input's dtype, then multiply by the weight. Source: Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import launch_table


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, backend: Backend | None = None) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, as a new contiguous tensor of x's shape and dtype.

    x may be [T, D], or [T, H, D] for the norm of single heads, and may be a strided view with a contiguous last axis.
    """
    _check_width(x_TD, weight_D)
    if choose_backend(x_TD.device, backend) == "torch":
        return reference.rms_norm(x_TD, weight_D, eps)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    x_THD, out_THD = _as_rows(x_TD), _as_rows(out)
    num_rows = x_THD.shape[0] * x_THD.shape[1]
    if num_rows == 0:
        return out
    rows, width = _tile(x_TD)
    _rms_norm_kernel[((num_rows + rows - 1) // rows,)](
        out_THD,
        x_THD,
        weight_D,
        num_rows,
        eps,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=x_THD.shape[1],
        WIDTH=x_THD.shape[2],
        BLOCK_ROWS=rows,
        BLOCK_WIDTH=width,
        **COMPILE_OPTIONS,
    )
    return out


def fused_add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, then normalise: returns `(rms_norm(x + residual), x + residual)`, two new contiguous tensors.

    The sum is rounded to the dtype of x before it is normalised, as two separate operations would round it.
    """
    _check_width(x_TD, weight_D)
    if x_TD.shape != residual_TD.shape or x_TD.dtype != residual_TD.dtype:
        raise UnsupportedShapeError(
            f"x is {list(x_TD.shape)} {x_TD.dtype}, its residual {list(residual_TD.shape)} {residual_TD.dtype}: "
            "they must be alike"
        )
    if choose_backend(x_TD.device, backend) == "torch":
        return reference.fused_add_rms_norm(x_TD, residual_TD, weight_D, eps)
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    new_residual = torch.empty_like(out)
    x_THD, residual_THD = _as_rows(x_TD), _as_rows(residual_TD)
    num_rows = x_THD.shape[0] * x_THD.shape[1]
    if num_rows == 0:
        return out, new_residual
    rows, width = _tile(x_TD)
    _fused_add_rms_norm_kernel[((num_rows + rows - 1) // rows,)](
        out,
        new_residual,
        x_THD,
        residual_THD,
        weight_D,
        num_rows,
        eps,
        x_THD.stride(0),
        x_THD.stride(1),
        residual_THD.stride(0),
        residual_THD.stride(1),
        HEADS=x_THD.shape[1],
        WIDTH=x_THD.shape[2],
        BLOCK_ROWS=rows,
        BLOCK_WIDTH=width,
        **COMPILE_OPTIONS,
    )
    return out, new_residual


def _check_width(x: torch.Tensor, weight_D: torch.Tensor) -> None:
    if x.dim() < 2 or weight_D.shape != x.shape[-1:] or x.stride(-1) != 1:
        raise UnsupportedShapeError(
            f"x {list(x.shape)} (strides {x.stride()}) does not fit a weight of {list(weight_D.shape)}: the last axis "
            "must be contiguous and as long as the weight"
        )


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """View of x as [T, H, D] (a copy only where leading axes cannot be merged)."""
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, x.shape[-2], x.shape[-1])


def _tile(x: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of one program: short rows, as those of single heads, share a program."""
    width = next_power_of_2(x.shape[-1])
    return max(1, launch_table(architecture(x.device)).tile_elements // width), width


@jit()
def _normalise(x, weight, eps, WIDTH: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of float32 `x`, zero beyond WIDTH, normalised; rounded to `dtype` before and after the weight."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    normalised = (x * scale[:, None]).to(dtype).to(tl.float32)
    return (normalised * weight[None, :]).to(dtype)


@jit(do_not_specialize=("num_rows",))
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    num_rows,
    eps,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    offset = (row // HEADS).to(tl.int64) * stride_token + (row % HEADS) * stride_head
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)
    out = _normalise(x.to(tl.float32), weight, eps, WIDTH, x.dtype)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], out, mask=mask)


@jit(do_not_specialize=("num_rows",))
def _fused_add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    new_residual_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    eps,
    stride_x_token,
    stride_x_head,
    stride_residual_token,
    stride_residual_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    x_offset = token * stride_x_token + head * stride_x_head
    residual_offset = token * stride_residual_token + head * stride_residual_head
    x = tl.load(x_ptr + x_offset[:, None] + column[None, :], mask=mask, other=0.0)
    residual = tl.load(residual_ptr + residual_offset[:, None] + column[None, :], mask=mask, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    out_offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(new_residual_ptr + out_offset, total, mask=mask)
    tl.store(out_ptr + out_offset, _normalise(total.to(tl.float32), weight, eps, WIDTH, x.dtype), mask=mask)
