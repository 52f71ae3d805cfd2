"""Products of eight-bit matrices: fp8 (per tensor, per channel, per block) and int8, scaled and biased once at the end.

Shapes: T tokens, I inputs, O outputs, B = O / block, C = I / block, rounded up. Block scales as in DeepSeek-V3
(arXiv 2412.19437): 128x128 of the weight, 1x128 of the activations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagefleet_kernels import reference
from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.fp8 import FP8, as_bytes, decode_e4m3, has_native_fp8
from pagefleet_kernels.tuning import MatmulTile, all_registers, launch_table, matmul_tile

_FEW_ROWS = 16
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Shift(NamedTuple):
    """What numbers around zero points need: products are of numbers less their row's zero point."""

    zeros_T: torch.Tensor
    """Whole numbers in float32, of 1 or T elements, within those of int8."""
    sums_O: torch.Tensor
    """int32: each row of the weight, added up; [E, O] of experts, contiguous."""


def scaled_matmul(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
    block: int | None = None,
    *,
    shift: Shift | None = None,
    tile: MatmulTile | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`(x * x_scale) (weight * weight_scale)^T + bias` as a new contiguous [T, O] of `out_dtype`.

    `x` and `weight` are both fp8 or both int8, or `x` is a float and `x_scale` None: then the weight is expanded in the
    kernel (fp8 on GPUs before sm_89). Scales are float32: for x of 1 or T elements, for the weight of 1 or O. With
    `block` they are [T, C] and [B, C]. Sums are float32 (int32 for int8); scales and bias follow before the rounding.
    `shift`: of int8 with scales by row. On Hopper most fp8 without blocks goes to `torch._scaled_mm`; `tile` asks for
    the Triton kernel with this launch.
    """
    _check(x_TI, x_scale, weight_OI, bias_O, out_dtype)
    if shift is not None:
        _check_shift(x_TI, x_scale, weight_OI, block, shift)
    x_scale, weight_scale = _shaped_scales(x_TI, x_scale, weight_OI, weight_scale, block)
    if choose_backend(x_TI.device, backend) == "torch":
        return reference.scaled_matmul(x_TI, x_scale, weight_OI, weight_scale, bias_O, out_dtype, block, shift)
    library_may = backend is None and tile is None and x_scale is not None and block is None
    if library_may and _library_takes(x_TI, weight_OI, weight_scale, out_dtype):
        assert x_scale is not None
        return _library_matmul(x_TI, x_scale, weight_OI, weight_scale, bias_O, out_dtype)
    if tile is None:
        tile = matmul_tile(launch_table(architecture(x_TI.device)).matmul, x_TI.shape[0])
    return _triton_matmul(x_TI, x_scale, weight_OI, weight_scale, bias_O, out_dtype, block, tile, shift)


def _check_shift(
    x_TI: torch.Tensor, x_scale: torch.Tensor | None, weight_OI: torch.Tensor, block: int | None, shift: Shift
) -> None:
    if x_TI.dtype != torch.int8 or x_scale is None or block is not None:
        raise UnsupportedShapeError(f"zero points beside {x_TI.dtype} are not supported: int8 with scales by row is")
    if shift.zeros_T.numel() not in (1, x_TI.shape[0]) or shift.sums_O.shape != weight_OI.shape[:1]:
        raise UnsupportedShapeError(
            f"{shift.zeros_T.numel()} zero points and {shift.sums_O.numel()} sums do not fit {x_TI.shape[0]} tokens "
            f"and {weight_OI.shape[0]} outputs"
        )


def _check(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if x_TI.dim() != 2 or weight_OI.dim() != 2 or x_TI.shape[1] != weight_OI.shape[1]:
        raise UnsupportedShapeError(
            f"activations {list(x_TI.shape)} and weights {list(weight_OI.shape)} must be [T, I] and [O, I]"
        )
    if x_TI.stride(1) != 1 or weight_OI.stride(1) != 1:
        raise UnsupportedShapeError("the last axis of activations and weights must be contiguous")
    matches = x_TI.dtype == weight_OI.dtype if x_scale is not None else x_TI.dtype in _FLOATS
    if weight_OI.dtype not in (FP8, torch.int8) or not matches:
        raise UnsupportedShapeError(
            f"cannot multiply {x_TI.dtype} {'with' if x_scale is not None else 'without'} scales by "
            f"{weight_OI.dtype}: float8_e4m3fn by float8_e4m3fn, int8 by int8, and floats without scales by either are "
            "supported"
        )
    if out_dtype not in _FLOATS:
        raise UnsupportedShapeError(f"a product in {out_dtype} is not supported: use bfloat16, float16 or float32")
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise UnsupportedShapeError(f"{weight_OI.shape[0]} outputs need as many biases, not {list(bias_O.shape)}")


def _shaped_scales(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    weight_scale: torch.Tensor,
    block: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Scales as [1 or T, 1] and [1, 1 or O], or as [T, C] and [B, C]."""
    num_tokens, num_outputs = x_TI.shape[0], weight_OI.shape[0]
    if block is not None:
        if block < 16 or block & (block - 1):
            raise UnsupportedShapeError(f"blocks of {block} are not supported: powers of two from 16 are")
        columns = -(-x_TI.shape[1] // block)
        wanted = [(num_tokens, columns), (-(-num_outputs // block), columns)]
        given = [wanted[0] if x_scale is None else tuple(x_scale.shape), tuple(weight_scale.shape)]
        if given != wanted:
            raise UnsupportedShapeError(f"scales {given} do not fit blocks of {block}: they must be {wanted}")
        return x_scale, weight_scale
    if (x_scale is not None and x_scale.numel() not in (1, num_tokens)) or weight_scale.numel() not in (1, num_outputs):
        raise UnsupportedShapeError(
            f"scales of {None if x_scale is None else x_scale.numel()} and {weight_scale.numel()} elements do not fit "
            f"{num_tokens} tokens and {num_outputs} outputs: they must have one, or one for each"
        )
    return None if x_scale is None else x_scale.reshape(-1, 1), weight_scale.reshape(1, -1)


def _library_takes(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype
) -> bool:
    """Whether `torch._scaled_mm` has this product, and is the one to ask: on sm_90, to bfloat16, sides of 16.

    With scales by row its tiles are 64 rows high and 128 columns wide: few rows leave most of the GPU idle.
    """
    return (
        x_TI.dtype == FP8
        and architecture(x_TI.device) == "sm_90"
        and out_dtype == torch.bfloat16
        and x_TI.shape[0] > (_FEW_ROWS if weight_scale.numel() > 1 else 0)
        and x_TI.shape[1] % 16 == 0
        and weight_OI.shape[0] % 16 == 0
        and x_TI.is_contiguous()
        and weight_OI.is_contiguous()
    )


def _library_matmul(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor,
    weight_OI: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if x_scale.numel() > 1 or weight_scale.numel() > 1:  # both by row then
        x_scale = x_scale.expand(x_TI.shape[0], 1).contiguous()
        weight_scale = weight_scale.expand(1, weight_OI.shape[0]).contiguous()
    else:
        x_scale, weight_scale = x_scale.view(()), weight_scale.view(())
    out_TO: torch.Tensor = torch._scaled_mm(
        x_TI,
        weight_OI.t(),
        scale_a=x_scale,
        scale_b=weight_scale,
        bias=None if bias_O is None else bias_O.to(out_dtype),
        out_dtype=out_dtype,
        use_fast_accum=True,
    )
    return out_TO


def _triton_matmul(
    x_TI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_OI: torch.Tensor,
    weight_scale: torch.Tensor,
    bias_O: torch.Tensor | None,
    out_dtype: torch.dtype,
    block: int | None,
    tile: MatmulTile,
    shift: Shift | None,
) -> torch.Tensor:
    (num_tokens, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=out_dtype, device=x_TI.device)
    if out_TO.numel() == 0:
        return out_TO
    block_k = tile.block_k // max(1, x_TI.element_size() // 2)  # tables are sized for two bytes at most
    if x_TI.dtype == FP8 and not has_native_fp8(x_TI.device):
        block_k = min(block_k, 64)  # both are decoded in registers, which hold no more
    tiles = (-(-num_tokens // tile.block_m), -(-num_outputs // tile.block_n))
    scale_TC = weight_scale if x_scale is None else x_scale
    _scaled_matmul_kernel[(tiles[0] * tiles[1],)](
        out_TO,
        as_bytes(x_TI),
        scale_TC,
        as_bytes(weight_OI),
        weight_scale,
        weight_scale if bias_O is None else bias_O,
        scale_TC if shift is None else shift.zeros_T,
        weight_scale if shift is None else shift.sums_O,
        num_tokens,
        tiles[0],
        x_TI.stride(0),
        weight_OI.stride(0),
        # a scale for all rows is read again and again
        scale_TC.stride(0) if scale_TC.shape[0] > 1 else 0,
        weight_scale.stride(0) if block is not None else int(weight_scale.shape[1] > 1),
        0 if shift is None else int(shift.zeros_T.numel() > 1),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        SCALE_BLOCK=block or 0,
        HAS_X_SCALE=x_scale is not None,
        HAS_SHIFT=shift is not None,
        HAS_BIAS=bias_O is not None,
        X_IS_FP8=x_TI.dtype == FP8,
        WEIGHT_IS_FP8=weight_OI.dtype == FP8,
        NATIVE=has_native_fp8(x_TI.device),
        dot_type=multiplied_type(x_TI),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(block_k, block or block_k, max(32, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **all_registers(x_TI.device),
        **COMPILE_OPTIONS,
    )
    return out_TO


def multiplied_type(x_TI: torch.Tensor) -> object:
    """The type that the tensor cores multiply: the activations' own, or one that holds their numbers exactly."""
    if x_TI.dtype == torch.int8:
        return tl.int8
    if x_TI.dtype == torch.float32 or INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        return tl.float32
    if x_TI.dtype == FP8:
        return tl.float8e4nv if has_native_fp8(x_TI.device) else tl.bfloat16
    return tl.float16 if x_TI.dtype == torch.float16 else tl.bfloat16


@jit()
def operand(x, IS_FP8: tl.constexpr, NATIVE: tl.constexpr, dot_type: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loaded numbers in the type that is multiplied."""
    if x.dtype == dot_type:
        operand = x
    elif not IS_FP8:
        operand = x.to(tl.float32).to(dot_type)
    elif dot_type == tl.float8e4nv:
        operand = x.to(tl.float8e4nv, bitcast=True)
    else:
        operand = decode_e4m3(x, NATIVE).to(dot_type)
    return operand


@jit(do_not_specialize=("num_tokens", "tiles_m", "stride_x_scale", "stride_weight_scale", "stride_zero"))
def _scaled_matmul_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    zero_ptr,
    weight_sum_ptr,
    num_tokens,
    tiles_m,
    stride_x,
    stride_weight,
    stride_x_scale,
    stride_weight_scale,
    stride_zero,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    WEIGHT_IS_FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    dot_type: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of the product. Neighbours share a tile of weights, which is the larger matrix."""
    program = tl.program_id(0)
    m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside_m, inside_n = m < num_tokens, n < OUTPUTS
    x_tile_ptr = x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    weight_tile_ptr = weight_ptr + n.to(tl.int64)[None, :] * stride_weight + k[:, None]
    total: tl.constexpr = tl.int32 if dot_type == tl.int8 else tl.float32
    sums = tl.zeros((BLOCK_M, BLOCK_N), total if SCALE_BLOCK == 0 else tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside_k = k < INPUTS - start
        x = tl.load(x_tile_ptr + start, mask=inside_m[:, None] & inside_k[None, :], other=0)
        weight = tl.load(weight_tile_ptr + start, mask=inside_k[:, None] & inside_n[None, :], other=0)
        x, weight = operand(x, X_IS_FP8, NATIVE, dot_type), operand(weight, WEIGHT_IS_FP8, NATIVE, dot_type)
        if SCALE_BLOCK == 0:
            sums = tl.dot(x, weight, sums, out_dtype=total, input_precision="ieee")
        else:
            part = tl.dot(x, weight, out_dtype=total, input_precision="ieee")
            column = start // SCALE_BLOCK
            scale_ptr = weight_scale_ptr + (n // SCALE_BLOCK) * stride_weight_scale + column
            scale = tl.load(scale_ptr, mask=inside_n, other=0.0)[None, :]
            if HAS_X_SCALE:
                scale *= tl.load(x_scale_ptr + m * stride_x_scale + column, mask=inside_m, other=0.0)[:, None]
            sums += part.to(tl.float32) * scale
    if HAS_SHIFT:
        zero = tl.load(zero_ptr + m * stride_zero, mask=inside_m, other=0.0).to(tl.int32)[:, None]
        sums -= zero * tl.load(weight_sum_ptr + n, mask=inside_n, other=0)[None, :]
    out = sums.to(tl.float32)
    if SCALE_BLOCK == 0:
        if HAS_X_SCALE:
            out *= tl.load(x_scale_ptr + m * stride_x_scale, mask=inside_m, other=0.0)[:, None]
        out *= tl.load(weight_scale_ptr + n * stride_weight_scale, mask=inside_n, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    out_tile_ptr = out_ptr + m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out_tile_ptr, out.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])
