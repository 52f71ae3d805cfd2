"""RMSNorm and LayerNorm, alone, after the addition of a residual, and rounded to eight bits for a product.

Shapes: T tokens, H heads, D normalised width. Rounding follows the models of Hugging Face: Llama's kind normalises in
float32, rounds to the input's dtype, then multiplies by the weight; Gemma's (`unit_offset`) multiplies by `1 + weight`
in float32 and rounds once. Sources: Zhang and Sennrich, arXiv 1910.07467; Ba et al., arXiv 1607.06450.
"""

from __future__ import annotations

from typing import overload

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import as_bytes
from pagefleet_kernels.quantize import Quantized, QuantizeSpec, quantize_constants, quantize_rows
from pagefleet_kernels.tuning import launch_table, tile_warps


@overload
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = ...,
    unit_offset: bool = ...,
    quantize: None = ...,
    backend: Backend | None = ...,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = ...,
    unit_offset: bool = ...,
    quantize: QuantizeSpec,
    backend: Backend | None = ...,
) -> Quantized: ...
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = None,
    unit_offset: bool = False,
    quantize: QuantizeSpec | None = None,
    backend: Backend | None = None,
) -> torch.Tensor | Quantized:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, as a new contiguous tensor of x's shape and dtype.

    x may be [T, D], or [T, H, D] for the norm of single heads, and may be a strided view with a contiguous last axis.
    With a residual, of the same shape and dtype, `residual += x` comes first, in place, and the sum is normalised, as
    two separate operations would round it. With `quantize`, x is [T, D] and the result is rounded from float32.
    """
    return _run(x_TD, weight_D, None, eps, False, unit_offset, residual_TD, quantize, backend)


@overload
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = ...,
    quantize: None = ...,
    backend: Backend | None = ...,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = ...,
    quantize: QuantizeSpec,
    backend: Backend | None = ...,
) -> Quantized: ...
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    *,
    residual_TD: torch.Tensor | None = None,
    quantize: QuantizeSpec | None = None,
    backend: Backend | None = None,
) -> torch.Tensor | Quantized:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last axis, rounded once; else as `rms_norm`.

    For x of [T, H, D] weight and bias may be [H, D]: each head's own.
    """
    return _run(x_TD, weight_D, bias_D, eps, True, False, residual_TD, quantize, backend)


def _run(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    centered: bool,
    unit_offset: bool,
    residual_TD: torch.Tensor | None,
    quantize: QuantizeSpec | None,
    backend: Backend | None,
) -> torch.Tensor | Quantized:
    _check(x_TD, residual_TD, weight_D, bias_D, quantize)
    if choose_backend(x_TD.device, backend) == "torch":
        if residual_TD is not None:
            x_TD = residual_TD.add_(x_TD)
        exact = x_TD if quantize is None else x_TD.float()
        if centered:
            out = reference.layer_norm(exact, weight_D, bias_D, eps)
        else:
            out = reference.rms_norm(exact, weight_D if quantize is None else weight_D.float(), eps, unit_offset)
        if quantize is None:
            return out
        return Quantized(*reference.quantize(out, quantize.dtype, quantize.static_scale, quantize.group))
    x_THD = _as_rows(x_TD)
    residual_THD = x_THD if residual_TD is None else _as_rows(residual_TD)
    num_rows, width = x_THD.shape[0] * x_THD.shape[1], x_THD.shape[2]
    out = torch.empty(x_TD.shape, dtype=x_TD.dtype if quantize is None else quantize.dtype, device=x_TD.device)
    scale = weight_D if quantize is None else quantize.scale_for(num_rows, width, x_TD.device)
    if num_rows:
        padded = max(next_power_of_2(width), 1 if quantize is None else quantize.group or 1)
        rows = max(1, launch_table(architecture(x_TD.device)).tile_elements // padded)
        _norm_kernel[((num_rows + rows - 1) // rows,)](
            as_bytes(out),
            scale,
            scale if quantize is None or quantize.static_scale is None else quantize.static_scale,
            x_THD,
            residual_THD,
            weight_D,
            weight_D if bias_D is None else bias_D,
            num_rows,
            eps,
            x_THD.stride(0),
            x_THD.stride(1),
            residual_THD.stride(0),
            residual_THD.stride(1),
            HEADS=x_THD.shape[1],
            WIDTH=width,
            BLOCK_ROWS=rows,
            BLOCK_WIDTH=padded,
            HAS_RESIDUAL=residual_TD is not None,
            UNIT_OFFSET=unit_offset,
            CENTERED=centered,
            HAS_BIAS=bias_D is not None,
            OF_HEADS=weight_D.dim() > 1,
            QUANTIZE=quantize is not None,
            num_warps=tile_warps(rows * padded),
            **quantize_constants(quantize, x_TD.device),
            **early_launch(x_TD.device),
            **COMPILE_OPTIONS,
        )
    return out if quantize is None else Quantized(out, scale)


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantize: QuantizeSpec | None,
) -> None:
    fits = weight.shape == x.shape[-1:] or (x.dim() == 3 and weight.shape == x.shape[1:])
    if x.dim() < 2 or not fits or x.stride(-1) != 1 or not weight.is_contiguous():
        raise UnsupportedShapeError(
            f"x {list(x.shape)} (strides {x.stride()}) does not fit a weight of {list(weight.shape)}: the last axis "
            "must be contiguous and as long as the weight"
        )
    if bias is not None and (bias.shape != weight.shape or not bias.is_contiguous()):
        raise UnsupportedShapeError(f"a bias of {list(bias.shape)} does not fit a weight of {list(weight.shape)}")
    if residual is not None and (x.shape != residual.shape or x.dtype != residual.dtype or residual.stride(-1) != 1):
        raise UnsupportedShapeError(
            f"x is {list(x.shape)} {x.dtype}, its residual {list(residual.shape)} {residual.dtype}: "
            "they must be alike, and the residual's last axis contiguous"
        )
    if quantize is not None and x.dim() != 2:
        raise UnsupportedShapeError(f"only [T, D] is normalised and quantized at once, not {list(x.shape)}")


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """View of x as [T, H, D]."""
    return x.unsqueeze(1) if x.dim() == 2 else x.view(-1, x.shape[-2], x.shape[-1])


@jit()
def apply_norm(  # type: ignore[no-untyped-def]
    x, weight, squares, eps, WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr, dtype: tl.constexpr
):
    """Float32 `x` normalised by its row's `squares` (their sum over WIDTH elements), as float32; rounded to `dtype`
    between norm and weight where the model's kind does so."""
    normalised = x * (1.0 / tl.sqrt(squares / WIDTH + eps))[:, None]
    if UNIT_OFFSET:
        weight += 1.0
    else:
        normalised = normalised.to(dtype).to(tl.float32)
    return normalised * weight[None, :]


@jit(do_not_specialize=("num_rows",))
def _norm_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    scale_ptr,
    static_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
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
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OF_HEADS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Short rows, as those of single heads, share a program."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    token, head = row // HEADS, row % HEADS
    if not OF_HEADS:  # a norm's parameters are no kernel's result
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    x_offset = token * stride_x_token + head * stride_x_head
    x = tl.load(x_ptr + x_offset[:, None] + column[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if HAS_RESIDUAL:
        residual_offset = (token * stride_residual_token + head * stride_residual_head)[:, None] + column[None, :]
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(residual_ptr + residual_offset, x, mask=mask)
    values = x.to(tl.float32)
    if CENTERED:
        values = tl.where(mask, values - (tl.sum(values, axis=1) / WIDTH)[:, None], 0.0)
        scaled = values * (1.0 / tl.sqrt(tl.sum(values * values, axis=1) / WIDTH + eps))[:, None]
        if OF_HEADS:
            of_head = head[:, None] * WIDTH + column[None, :]
            out = scaled * tl.load(weight_ptr + of_head, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                out += tl.load(bias_ptr + of_head, mask=mask, other=0.0).to(tl.float32)
        else:
            out = scaled * weight[None, :]
            if HAS_BIAS:
                out += tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    else:
        squares = tl.sum(values * values, axis=1)
        out = apply_norm(values, weight, squares, eps, WIDTH, UNIT_OFFSET, tl.float32 if QUANTIZE else dtype)
    if QUANTIZE:
        quantize_rows(out_ptr, scale_ptr, static_ptr, out, row, column, num_rows, WIDTH, GROUP, STATIC, FP8, NATIVE)
    else:
        tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], out.to(dtype), mask=mask)
