"""Products of a mixture of experts: every row by the matrices of its own experts, in launches of a fixed shape.

A program multiplies rows of one expert alone, those of a block of `expert_blocks`.

Shapes: R rows, K experts of each, P = R * K pairs of row and expert, E experts, I inputs, O outputs, G gate width,
M rows of a block, B blocks, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagefleet_kernels import reference_experts
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.expert_blocks import ExpertBlocks
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.expert_tiles import begin_tile, end_tile
from pagefleet_kernels.fp8 import FP8, as_bytes, has_native_fp8
from pagefleet_kernels.mxfp4 import MXFP4_BLOCK
from pagefleet_kernels.mxfp4_experts import multiply_mxfp4
from pagefleet_kernels.quantize import Activations, Quantized
from pagefleet_kernels.scaled_matmul import Shift, multiplied_type, operand
from pagefleet_kernels.tuning import launch_table, tile_warps

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The matrices of all experts, side by side."""

    values_EOI: torch.Tensor
    """A float type, float8_e4m3fn or int8; or uint8 [E, O, I / 2], codes of MXFP4; contiguous."""
    scales: torch.Tensor | None = None
    """float32 [E, O], or with a block [E, O / block, I / block], rounded up; uint8 [E, O, I / 32] of MXFP4; None for a
    float type."""
    block: int | None = None
    """Rows and columns that share a scale, a power of two."""
    bias_EO: torch.Tensor | None = None
    """Of a float type; contiguous."""


def grouped_matmul(
    x: Activations,
    weights: ExpertWeights,
    blocks: ExpertBlocks,
    out_dtype: torch.dtype,
    *,
    top_k: int = 1,
    gate: Gate | None = None,
    shift: Shift | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Each pair's row by its expert's matrix, and its bias: a new [P, O] of `out_dtype`; [P, G] where a `gate` joins
    halves.

    Pair p reads row `p // top_k` of `x`: [P / top_k, I], floats, or rounded as the weights are. Gate and up are the
    halves of O. Pairs in no block are left as they come. Sums are float32 (int32 for int8). `shift`: of int8 that was
    rounded with zero points, one for each row of `x` or for all.
    """
    values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    _check(values, scale, weights, blocks, out_dtype, top_k)
    if shift is not None:
        _check_shift(values, scale, weights, shift)
    if choose_backend(values.device, backend) == "torch":
        return reference_experts.grouped_matmul(
            values, scale, weights.values_EOI, weights.scales, weights.block, weights.bias_EO, blocks.pairs_BM,
            blocks.experts_B, out_dtype, blocks.num_pairs, top_k, gate, shift,
        )  # fmt: skip
    return _triton_grouped_matmul(values, scale, weights, blocks, out_dtype, top_k, gate, shift)


def combine_experts(
    y_PD: torch.Tensor, weights_RK: torch.Tensor, experts_RK: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """`sum over k of weights[r, k] * y[r * K + k]` in float32, a new [R, D] of y's dtype.

    Pairs of an expert below 0 count nothing, whatever y holds there.
    """
    num_rows, top_k = weights_RK.shape
    if y_PD.dim() != 2 or y_PD.shape[0] != num_rows * top_k or not y_PD.is_contiguous():
        raise UnsupportedShapeError(f"{list(y_PD.shape)} is not a contiguous row for each of {num_rows} x {top_k}")
    if choose_backend(y_PD.device, backend) == "torch":
        return reference_experts.combine_experts(y_PD, weights_RK, experts_RK)
    width = y_PD.shape[1]
    out_RD = torch.empty((num_rows, width), dtype=y_PD.dtype, device=y_PD.device)
    if out_RD.numel():
        block = min(next_power_of_2(width), launch_table(architecture(y_PD.device)).tile_elements)
        _combine_kernel[(num_rows, -(-width // block))](
            out_RD,
            y_PD,
            weights_RK.contiguous(),
            experts_RK.contiguous(),
            WIDTH=width,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=tile_warps(block),
            **early_launch(y_PD.device),
            **COMPILE_OPTIONS,
        )
    return out_RD


def _check(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: ExpertWeights,
    blocks: ExpertBlocks,
    out_dtype: torch.dtype,
    top_k: int,
) -> None:
    values, scales = weights.values_EOI, weights.scales
    is_mxfp4 = values.dtype == torch.uint8
    inputs = values.shape[-1] * (2 if is_mxfp4 else 1)
    if x.dim() != 2 or values.dim() != 3 or x.shape[1] != inputs or len(x) * top_k != blocks.num_pairs:
        raise UnsupportedShapeError(
            f"{list(x.shape)} and {list(values.shape)} must be [P / {top_k}, I] and [E, O, I] of {blocks.num_pairs} "
            "pairs"
        )
    if x.stride(1) != 1 or not values.is_contiguous():
        raise UnsupportedShapeError("experts' matrices and the last axis of activations must be contiguous")
    if is_mxfp4 and (
        inputs % MXFP4_BLOCK
        or scales is None
        or scales.shape != (*values.shape[:2], inputs // MXFP4_BLOCK)
        or not scales.is_contiguous()
    ):
        raise UnsupportedShapeError(f"MXFP4 has {MXFP4_BLOCK} inputs for each scale; {list(values.shape)} must fit")
    is_byte = values.dtype in (FP8, torch.int8, torch.uint8)
    fits = x.dtype == values.dtype if scale is not None or not is_byte else x.dtype in _FLOATS
    if not fits or is_byte != (scales is not None) or out_dtype not in _FLOATS:
        raise UnsupportedShapeError(
            f"cannot multiply {x.dtype} by experts of {values.dtype} into {out_dtype}: equal types, or floats by fp8, "
            "int8 or MXFP4 with scales, into a float type are supported"
        )
    bias = weights.bias_EO
    if bias is not None and (bias.shape != values.shape[:2] or bias.dtype not in _FLOATS or not bias.is_contiguous()):
        raise UnsupportedShapeError(
            f"biases must be contiguous floats {list(values.shape[:2])}, not {list(bias.shape)}"
        )


def _check_shift(x: torch.Tensor, scale: torch.Tensor | None, weights: ExpertWeights, shift: Shift) -> None:
    zeros, sums, values = shift.zeros_T, shift.sums_O, weights.values_EOI
    if x.dtype != torch.int8 or scale is None or weights.block is not None:
        raise UnsupportedShapeError(f"zero points beside {x.dtype} are not supported: int8 with scales by row is")
    if zeros.numel() not in (1, len(x)) or sums.shape != values.shape[:2] or not sums.is_contiguous():
        raise UnsupportedShapeError(
            f"{zeros.numel()} zero points and sums {list(sums.shape)} do not fit {len(x)} rows and experts "
            f"{list(values.shape[:2])}"
        )


def _triton_grouped_matmul(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: ExpertWeights,
    blocks: ExpertBlocks,
    out_dtype: torch.dtype,
    top_k: int,
    gate: Gate | None,
    shift: Shift | None,
) -> torch.Tensor:
    tile, values, block = blocks.tile, weights.values_EOI, weights.block
    _, num_rows, num_inputs = values.shape
    num_outputs = num_rows if gate is None else num_rows // 2
    out_PO = torch.empty((blocks.num_pairs, num_outputs), dtype=out_dtype, device=x.device)
    if out_PO.numel() == 0:
        return out_PO
    if values.dtype == torch.uint8:
        assert weights.scales is not None, "checked before"
        stored = values, weights.scales, weights.bias_EO
        multiply_mxfp4(out_PO, x, stored, (blocks.pairs_BM, blocks.experts_B), top_k, gate, tile)
        return out_PO
    block_n = tile.block_n if gate is None else max(16, tile.block_n // 2)  # of each of two products
    native = has_native_fp8(x.device)
    if x.dtype == FP8 and block is not None and not native:  # decoded numbers and scaled sums take the registers
        block_n = max(16, block_n // 2)
    block_k = tile.block_k // max(1, x.element_size() // 2)  # tables are sized for two bytes at most
    num_blocks = len(blocks.experts_B)
    any_scale = blocks.pairs_BM if weights.scales is None else weights.scales
    _grouped_kernel[(num_blocks * -(-num_outputs // block_n),)](
        out_PO,
        as_bytes(x),
        any_scale if scale is None else scale,
        as_bytes(values),
        any_scale,
        blocks.pairs_BM if weights.bias_EO is None else weights.bias_EO,
        any_scale if shift is None else shift.zeros_T,
        blocks.pairs_BM if shift is None else shift.sums_O,
        blocks.pairs_BM,
        blocks.experts_B,
        blocks.num_pairs,
        num_blocks,
        x.stride(0),
        0 if scale is None or scale.numel() == 1 else scale.stride(0),
        0 if shift is None else int(shift.zeros_T.numel() > 1),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        TOP_K=top_k,
        GATED=gate is not None,
        KIND=gate or "silu",
        SCALE_BLOCK=block or 0,
        HAS_SCALES=weights.scales is not None,
        HAS_X_SCALE=scale is not None,
        HAS_SHIFT=shift is not None,
        HAS_BIAS=weights.bias_EO is not None,
        X_IS_FP8=x.dtype == FP8,
        WEIGHT_IS_FP8=values.dtype == FP8,
        NATIVE=native,
        dot_type=multiplied_type(x),
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, block or block_k, max(32, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x.device),
        **COMPILE_OPTIONS,
    )
    return out_PO


@jit(do_not_specialize=("num_pairs", "num_blocks", "stride_x_scale", "stride_zero"))
def _grouped_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    zero_ptr,
    weight_sum_ptr,
    pairs_ptr,
    block_experts_ptr,
    num_pairs,
    num_blocks,
    stride_x,
    stride_x_scale,
    stride_zero,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
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
    EARLY: tl.constexpr,
):
    """One program per block of pairs and tile of outputs."""
    expert, pair, inside_m, n, inside_n = begin_tile(
        pairs_ptr, block_experts_ptr, num_pairs, num_blocks, OUTPUTS, BLOCK_M, BLOCK_N, EARLY
    )
    if expert < 0:
        return
    row = (pair // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    x_tile_ptr = x_ptr + row[:, None] * stride_x + k[None, :]
    weight_tile_ptr = weight_ptr + (expert * rows + n)[None, :] * INPUTS + k[:, None]
    total: tl.constexpr = tl.int32 if dot_type == tl.int8 else tl.float32
    sums = tl.zeros((BLOCK_M, BLOCK_N), total if SCALE_BLOCK == 0 else tl.float32)
    up_sums = tl.zeros((BLOCK_M, BLOCK_N), total if SCALE_BLOCK == 0 else tl.float32)
    size: tl.constexpr = SCALE_BLOCK if SCALE_BLOCK > 0 else 1
    block_rows: tl.constexpr = (rows + size - 1) // size
    columns: tl.constexpr = (INPUTS + size - 1) // size if SCALE_BLOCK > 0 else 1
    up_scales: tl.constexpr = OUTPUTS // size * columns
    scale_ptr = weight_scale_ptr + (expert * block_rows + n // size) * columns
    x_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside_k = k < INPUTS - start
        inside = inside_k[:, None] & inside_n[None, :]
        x = tl.load(x_tile_ptr + start, mask=inside_m[:, None] & inside_k[None, :], other=0)
        x = operand(x, X_IS_FP8, NATIVE, dot_type)
        if SCALE_BLOCK > 0 and HAS_X_SCALE:
            x_scale_tile_ptr = x_scale_ptr + row * stride_x_scale + start // size
            x_scale = tl.load(x_scale_tile_ptr, mask=inside_m, other=0.0)
        tile_scale_ptr = scale_ptr + start // size
        sums = _add_product(
            sums, x, x_scale, weight_tile_ptr + start, inside, tile_scale_ptr, inside_n,
            WEIGHT_IS_FP8, NATIVE, dot_type, SCALE_BLOCK > 0,
        )  # fmt: skip
        if GATED:
            up_sums = _add_product(
                up_sums, x, x_scale, weight_tile_ptr + OUTPUTS * INPUTS + start, inside, tile_scale_ptr + up_scales,
                inside_n, WEIGHT_IS_FP8, NATIVE, dot_type, SCALE_BLOCK > 0,
            )  # fmt: skip
    if HAS_SHIFT:
        zero = tl.load(zero_ptr + row * stride_zero, mask=inside_m, other=0.0).to(tl.int32)[:, None]
        weight_sum_ptr += expert * rows + n
        sums -= zero * tl.load(weight_sum_ptr, mask=inside_n, other=0)[None, :]
        if GATED:
            up_sums -= zero * tl.load(weight_sum_ptr + OUTPUTS, mask=inside_n, other=0)[None, :]
    out, up = sums.to(tl.float32), up_sums.to(tl.float32)
    if HAS_SCALES and SCALE_BLOCK == 0:
        if HAS_X_SCALE:
            x_scale = tl.load(x_scale_ptr + row * stride_x_scale, mask=inside_m, other=0.0)
        out *= x_scale[:, None] * tl.load(scale_ptr, mask=inside_n, other=0.0)[None, :]
        if GATED:
            up *= x_scale[:, None] * tl.load(scale_ptr + up_scales, mask=inside_n, other=0.0)[None, :]
    end_tile(
        out_ptr, bias_ptr + expert * rows + n, pair, inside_m, n, inside_n, out, up, OUTPUTS, HAS_BIAS, GATED, KIND
    )


@jit()
def _add_product(  # type: ignore[no-untyped-def]
    sums,
    x,
    x_scale,
    weight_ptr,
    inside,
    scale_ptr,
    inside_n,
    WEIGHT_IS_FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    dot_type: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """`sums` and the product of a tile of rows with one of weights, scaled at once where scales are of blocks."""
    weight = operand(tl.load(weight_ptr, mask=inside, other=0), WEIGHT_IS_FP8, NATIVE, dot_type)
    total: tl.constexpr = tl.int32 if dot_type == tl.int8 else tl.float32
    if BLOCKED:
        scale = tl.load(scale_ptr, mask=inside_n, other=0.0)
        part = tl.dot(x, weight, out_dtype=total, input_precision="ieee").to(tl.float32)
        sums += part * (x_scale[:, None] * scale[None, :])
    else:
        sums = tl.dot(x, weight, sums, out_dtype=total, input_precision="ieee")
    return sums


@jit()
def _combine_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    y_ptr,
    weights_ptr,
    experts_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(TOP_K):
        pair = row * TOP_K + place
        found = tl.load(experts_ptr + pair) >= 0
        y = tl.load(y_ptr + pair * WIDTH + column, mask=inside & found, other=0.0).to(tl.float32)
        total += tl.where(found, tl.load(weights_ptr + pair), 0.0) * y
    tl.store(out_ptr + row * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)
