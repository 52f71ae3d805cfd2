"""Experts' products with matrices in codes of 4 bits: the blocks of `experts`, the weights of `coded_matmul`.

Shapes: R rows, P pairs of row and expert, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from pagefleet_kernels import reference_experts
from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.coded_matmul import CodedWeights, check_coded, multiply_codes, scale_bits
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.early_launch import early_launch
from pagefleet_kernels.expert_blocks import ExpertBlocks
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.expert_tiles import begin_tile, end_tile
from pagefleet_kernels.fp8 import as_bytes, has_native_fp8
from pagefleet_kernels.packed_experts import rows_of_each
from pagefleet_kernels.packed_matmul import RUN, inputs_of


def grouped_coded_matmul(
    x_RI: torch.Tensor,
    weights: CodedWeights,
    num_experts: int,
    blocks: ExpertBlocks,
    *,
    top_k: int = 1,
    gate: Gate | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """As `experts.grouped_matmul` without biases, in x's dtype; `weights` has the experts' rows one after another."""
    check_coded(x_RI, weights, None)
    num_rows = rows_of_each(weights, num_experts, len(x_RI) * top_k, blocks)
    num_outputs = num_rows if gate is None else num_rows // 2
    out_PO = x_RI.new_empty((blocks.num_pairs, num_outputs))
    if choose_backend(x_RI.device, backend) == "torch":
        return reference_experts.grouped_few_bits_matmul(
            x_RI, None, weights, num_rows, blocks.pairs_BM, blocks.experts_B, out_PO.zero_(), top_k, gate
        )
    if out_PO.numel() == 0:
        return out_PO
    tile, num_inputs, num_blocks = blocks.tile, weights.num_inputs, len(blocks.experts_B)
    block_n = tile.block_n if gate is None else max(16, tile.block_n // 2)  # of each of two products
    block_k = tile.block_k // max(1, x_RI.element_size() // 2)  # tables are sized for two bytes at most
    _grouped_coded_kernel[(num_blocks * -(-num_outputs // block_n),)](
        out_PO,
        x_RI,
        weights.codes,
        out_PO if weights.table is None else weights.table,
        as_bytes(weights.scales_OG),
        out_PO if weights.factor_O is None else weights.factor_O,
        blocks.pairs_BM,
        blocks.experts_B,
        blocks.num_pairs,
        num_blocks,
        x_RI.stride(0),
        weights.codes.stride(0),
        weights.scales_OG.stride(0),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        GROUP=weights.group,
        TOP_K=top_k,
        GATED=gate is not None,
        KIND=gate or "silu",
        E2M1=weights.table is None,
        SCALE_BITS=scale_bits(weights.scales_OG.dtype),
        HAS_FACTOR=weights.factor_O is not None,
        NATIVE=has_native_fp8(x_RI.device),
        IEEE=INTERPRETED,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(max(RUN, block_k), max(RUN, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x_RI.device),
        **COMPILE_OPTIONS,
    )
    return out_PO


@jit(do_not_specialize=("num_pairs", "num_blocks"))
def _grouped_coded_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    table_ptr,
    scale_ptr,
    factor_ptr,
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
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    E2M1: tl.constexpr,
    SCALE_BITS: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
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
    j = tl.arange(0, BLOCK_K // 2)
    k = inputs_of(j, 4)
    x_tile_ptr = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
    code_tile_ptr = weight_ptr + row_n[None, :] * stride_weight + j[:, None]
    scale_row_ptr = scale_ptr + row_n[None, :] * stride_scale
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        inside_k = k < INPUTS - start
        mask = inside_k[:, None] & inside_n[None, :]
        codes = tl.load(code_tile_ptr + start // 2, mask=mask, other=0)
        up_codes = codes
        if GATED:
            up_codes = tl.load(code_tile_ptr + OUTPUTS * stride_weight + start // 2, mask=mask, other=0)
        for half in tl.static_range(2):
            x = tl.load(x_tile_ptr + start + 16 * half, mask=inside_m[:, None] & inside_k[None, :], other=0.0)
            scale_tile_ptr = scale_row_ptr + ((start + k + 16 * half) // GROUP)[:, None]
            out = multiply_codes(
                x, (codes >> (4 * half)) & 15, scale_tile_ptr, mask, out, table_ptr, E2M1, SCALE_BITS, NATIVE, IEEE
            )
            if GATED:
                up = multiply_codes(
                    x, (up_codes >> (4 * half)) & 15, scale_tile_ptr + OUTPUTS * stride_scale, mask, up, table_ptr,
                    E2M1, SCALE_BITS, NATIVE, IEEE,
                )  # fmt: skip
    if HAS_FACTOR:
        out *= tl.load(factor_ptr + row_n, mask=inside_n, other=0.0)[None, :]
        if GATED:
            up *= tl.load(factor_ptr + row_n + OUTPUTS, mask=inside_n, other=0.0)[None, :]
    end_tile(out_ptr, out_ptr, pair, inside_m, n, inside_n, out, up, OUTPUTS, False, GATED, KIND)
