"""Experts' products with matrices in numbers of 4 or 8 bits: the blocks of `experts`, the weights of `packed_matmul`.

Columns in act order stand in the order of their groups, another one for each expert: `order_inputs` puts rows so before
the product, which then reads them straight.

Shapes: R rows, P pairs of row and expert, E experts, I inputs, O outputs, B blocks of M pairs.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_experts
from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.expert_blocks import ExpertBlocks
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.expert_tiles import begin_tile, end_tile
from pagefleet_kernels.fp8 import FP8, as_bytes, has_native_fp8
from pagefleet_kernels.packed_matmul import (
    RUN,
    PackedWeights,
    check_packed,
    inputs_of,
    load_inputs,
    load_zeros,
    multiply_numbers,
)
from pagefleet_kernels.quantize import Activations, Quantized
from pagefleet_kernels.tuning import launch_table, tile_warps

_MANY_ROWS = 64


def grouped_packed_matmul(
    x: Activations,
    weights: PackedWeights,
    num_experts: int,
    blocks: ExpertBlocks,
    out_dtype: torch.dtype,
    *,
    top_k: int = 1,
    gate: Gate | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """As `experts.grouped_matmul` without biases; `weights` has the experts' rows one after another.

    Inputs that were rounded, with a scale for each row, are multiplied as in `packed_rounded_matmul`; floats are of
    `out_dtype`.
    """
    x_RI, scale_R1 = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    if scale_R1 is not None and scale_R1.shape != (len(x_RI), 1):
        raise UnsupportedShapeError(f"{len(x_RI)} rows need a scale each, not {list(scale_R1.shape)}")
    check_packed(x_RI, weights, None, (out_dtype,) if scale_R1 is None else (FP8, torch.int8))
    num_rows = rows_of_each(weights, num_experts, len(x_RI) * top_k, blocks)
    num_outputs = num_rows if gate is None else num_rows // 2
    out_PO = torch.empty((blocks.num_pairs, num_outputs), dtype=out_dtype, device=x_RI.device)
    if choose_backend(x_RI.device, backend) == "torch":
        return reference_experts.grouped_few_bits_matmul(
            x_RI, scale_R1, weights, num_rows, blocks.pairs_BM, blocks.experts_B, out_PO.zero_(), top_k, gate
        )
    if out_PO.numel() == 0:
        return out_PO
    tile, group, num_inputs, num_blocks = blocks.tile, weights.group or 0, weights.num_inputs, len(blocks.experts_B)
    block_n = tile.block_n if gate is None else max(16, tile.block_n // 2)  # of each of two products
    many_rows = _MANY_ROWS if scale_R1 is None else _MANY_ROWS // 2
    if gate is not None and group and tile.block_m >= many_rows:  # their parts are scaled apart, which takes registers
        block_n = max(16, block_n // 2)
    block_k = max(RUN, min(64, tile.block_k) // max(1, x_RI.element_size() // 2))
    _grouped_packed_kernel[(num_blocks * -(-num_outputs // block_n),)](
        out_PO,
        as_bytes(x_RI),
        weights.scales_OG if scale_R1 is None else scale_R1,
        weights.numbers,
        weights.scales_OG,
        weights.scales_OG if weights.zeros_OG is None else weights.zeros_OG,
        blocks.pairs_BM,
        blocks.experts_B,
        blocks.num_pairs,
        num_blocks,
        x_RI.stride(0),
        weights.numbers.stride(0),
        weights.scales_OG.stride(0),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        GROUP=group,
        BITS=weights.bits,
        TOP_K=top_k,
        GATED=gate is not None,
        KIND=gate or "silu",
        HAS_ZEROS=weights.zeros_OG is not None,
        HAS_X_SCALE=scale_R1 is not None,
        X_IS_FP8=x_RI.dtype == FP8,
        NATIVE=has_native_fp8(x_RI.device),
        IEEE=INTERPRETED,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(block_k, group or block_k, max(RUN, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x_RI.device),
        **COMPILE_OPTIONS,
    )
    return out_PO


def rows_of_each(weights: PackedWeights | CodedWeights, num_experts: int, num_pairs: int, blocks: ExpertBlocks) -> int:
    """Rows of an expert's matrix.

    Raises:
        UnsupportedShapeError: experts have not as many each, or there are other pairs than in the blocks.
    """
    if weights.num_outputs % num_experts or num_pairs != blocks.num_pairs:
        raise UnsupportedShapeError(
            f"{num_pairs} pairs of row and expert and {weights.num_outputs} rows of weights must be {blocks.num_pairs} "
            f"pairs, and as many for each of {num_experts} experts"
        )
    return weights.num_outputs // num_experts


def order_inputs(
    x_RI: torch.Tensor, order_EI: torch.Tensor, experts_RK: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Each pair's row with its inputs in the order of its expert's columns: a new [P, I], `x[p // K, order[e, i]]`.

    `order_EI` is int32, `experts_RK` int32 and contiguous; rows of pairs of an expert below 0 are left as they come.
    """
    (num_rows, num_inputs), (_, top_k) = x_RI.shape, experts_RK.shape
    if (
        order_EI.shape[1] != num_inputs
        or len(experts_RK) != num_rows
        or x_RI.stride(1) != 1
        or not (order_EI.is_contiguous() and experts_RK.is_contiguous())
    ):
        raise UnsupportedShapeError(
            f"{list(x_RI.shape)}, orders {list(order_EI.shape)} and experts {list(experts_RK.shape)} must be [R, I], "
            "[E, I] and [R, K], contiguous"
        )
    out_PI = x_RI.new_empty((num_rows * top_k, num_inputs))
    if choose_backend(x_RI.device, backend) == "torch":
        return reference_experts.order_inputs(x_RI, order_EI, experts_RK, out_PI)
    if out_PI.numel():
        block = min(next_power_of_2(num_inputs), launch_table(architecture(x_RI.device)).tile_elements)
        _order_inputs_kernel[(len(out_PI), -(-num_inputs // block))](
            out_PI,
            x_RI,
            order_EI,
            experts_RK,
            x_RI.stride(0),
            INPUTS=num_inputs,
            TOP_K=top_k,
            BLOCK=block,
            num_warps=tile_warps(block),
            **early_launch(x_RI.device),
            **COMPILE_OPTIONS,
        )
    return out_PI


@jit()
def _order_inputs_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    order_ptr,
    experts_ptr,
    stride_x,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per pair and tile of inputs."""
    wait_for_inputs(EARLY)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INPUTS
    source = tl.load(order_ptr + expert * INPUTS + column, mask=inside, other=0)
    x = tl.load(x_ptr + pair // TOP_K * stride_x + source, mask=inside, other=0.0)
    tl.store(out_ptr + pair * INPUTS + column, x, mask=inside)


@jit(do_not_specialize=("num_pairs", "num_blocks"))
def _grouped_packed_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    pairs_ptr,
    block_experts_ptr,
    num_pairs,
    num_blocks,
    stride_x,
    stride_weight,
    stride_scale,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    IEEE: tl.constexpr,
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
    row_n = expert * (2 * OUTPUTS if GATED else OUTPUTS) + n
    j = tl.arange(0, BLOCK_K * BITS // 8)
    k = inputs_of(j, BITS)
    row = (pair // TOP_K).to(tl.int64)
    x_tile_ptr = x_ptr + row[:, None] * stride_x + k[None, :]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside_k = k < INPUTS - start
        mask = inside_m[:, None] & inside_k[None, :]
        x = load_inputs(x_tile_ptr + start, mask, HAS_X_SCALE, X_IS_FP8, NATIVE)
        upper_x = x
        if BITS == 4:
            upper_x = load_inputs(x_tile_ptr + start + 16, mask, HAS_X_SCALE, X_IS_FP8, NATIVE)
        weight_mask = inside_k[:, None] & inside_n[None, :]
        bytes_ptr = weight_ptr + row_n[None, :] * stride_weight + j[:, None] + start * BITS // 8
        column = start // GROUP if GROUP > 0 else 0
        shared = row_n * stride_scale + column
        part = _part(x, upper_x, bytes_ptr, zero_ptr + shared, weight_mask, inside_n, out, GROUP, BITS, HAS_ZEROS, IEEE)
        if GROUP == 0:
            out = part
        else:
            out += part * tl.load(scale_ptr + shared, mask=inside_n, other=0.0)[None, :]
        if GATED:
            bytes_ptr += OUTPUTS * stride_weight
            shared += OUTPUTS * stride_scale
            part = _part(
                x, upper_x, bytes_ptr, zero_ptr + shared, weight_mask, inside_n, up, GROUP, BITS, HAS_ZEROS, IEEE
            )
            if GROUP == 0:
                up = part
            else:
                up += part * tl.load(scale_ptr + shared, mask=inside_n, other=0.0)[None, :]
    if GROUP == 0:
        out *= tl.load(scale_ptr + row_n * stride_scale, mask=inside_n, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale_ptr + (row_n + OUTPUTS) * stride_scale, mask=inside_n, other=0.0)[None, :]
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr + row, mask=inside_m, other=0.0)[:, None]
        out *= x_scale
        up *= x_scale
    end_tile(out_ptr, out_ptr, pair, inside_m, n, inside_n, out, up, OUTPUTS, False, GATED, KIND)


@jit()
def _part(  # type: ignore[no-untyped-def]
    x,
    upper_x,
    bytes_ptr,
    zero_ptr,
    mask,
    inside_n,
    sums,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IEEE: tl.constexpr,
):
    """Products with these bytes' numbers less their zero points; on top of the sums where all share a scale."""
    weight = tl.load(bytes_ptr, mask=mask, other=0)
    zero = 1 << (BITS - 1)
    if HAS_ZEROS:
        zero = load_zeros(zero_ptr, inside_n)
    part = sums
    if GROUP > 0:
        part = tl.zeros_like(sums)
    if BITS == 4:
        part = multiply_numbers(x, (weight & 15).to(tl.int32) - zero, part, IEEE)
        part = multiply_numbers(upper_x, (weight >> 4).to(tl.int32) - zero, part, IEEE)
    else:
        part = multiply_numbers(x, weight.to(tl.int32) - zero, part, IEEE)
    return part
