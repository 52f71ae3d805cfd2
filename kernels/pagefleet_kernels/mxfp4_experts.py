"""The grouped product of `experts` with matrices in MXFP4, whose numbers are made in registers. Shapes as there."""

from __future__ import annotations

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.early_launch import early_launch
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.expert_tiles import begin_tile, end_tile
from pagefleet_kernels.mxfp4 import MXFP4_BLOCK, decode_e2m1, decode_scale
from pagefleet_kernels.tuning import MatmulTile


def multiply_mxfp4(
    out_PO: torch.Tensor,
    x_RI: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    blocks: tuple[torch.Tensor, torch.Tensor],
    top_k: int,
    gate: Gate | None,
    tile: MatmulTile,
) -> None:
    """Fill `out_PO` by the kernel. `weights`: bytes [E, O, I / 2], scales [E, O, I / 32] and biases [E, O]; `blocks`:
    pairs [B, M] and experts [B]."""
    (codes, scales, bias_EO), (pairs_BM, experts_B) = weights, blocks
    num_pairs, num_outputs = out_PO.shape
    num_blocks, num_inputs = len(experts_B), x_RI.shape[1]
    block_n = tile.block_n if gate is None else max(16, tile.block_n // 2)  # of each of two products
    block_k = tile.block_k // max(1, x_RI.element_size() // 2)  # tables are sized for two bytes at most
    _grouped_mxfp4_kernel[(num_blocks * -(-num_outputs // block_n),)](
        out_PO,
        x_RI,
        codes,
        scales,
        pairs_BM if bias_EO is None else bias_EO,
        pairs_BM,
        experts_B,
        num_pairs,
        num_blocks,
        x_RI.stride(0),
        OUTPUTS=num_outputs,
        INPUTS=num_inputs,
        TOP_K=top_k,
        GATED=gate is not None,
        KIND=gate or "silu",
        HAS_BIAS=bias_EO is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=max(MXFP4_BLOCK, min(block_k, next_power_of_2(num_inputs))),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early_launch(x_RI.device),
        **COMPILE_OPTIONS,
    )


@jit(do_not_specialize=("num_pairs", "num_blocks"))
def _grouped_mxfp4_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    pairs_ptr,
    block_experts_ptr,
    num_pairs,
    num_blocks,
    stride_x,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    k = tl.arange(0, BLOCK_K)
    row_n = expert * (2 * OUTPUTS if GATED else OUTPUTS) + n
    x_tile_ptr = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k[None, :]
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        x = tl.load(x_tile_ptr + start, mask=inside_m[:, None] & (k < INPUTS - start)[None, :], other=0.0)
        weight = _weights(weight_ptr, scale_ptr, row_n, start, inside_n, INPUTS, BLOCK_N, BLOCK_K)
        out = tl.dot(x, weight.to(x.dtype), out, input_precision="ieee")
        if GATED:
            weight = _weights(weight_ptr, scale_ptr, row_n + OUTPUTS, start, inside_n, INPUTS, BLOCK_N, BLOCK_K)
            up = tl.dot(x, weight.to(x.dtype), up, input_precision="ieee")
    end_tile(out_ptr, bias_ptr + row_n, pair, inside_m, n, inside_n, out, up, OUTPUTS, HAS_BIAS, GATED, KIND)


@jit()
def _weights(  # type: ignore[no-untyped-def]
    weight_ptr,
    scale_ptr,
    row_n,
    start,
    inside_n,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [K, N] of the numbers of these rows from `start` on; beyond the last input they are zero."""
    groups: tl.constexpr = INPUTS // 32
    group = start // 32 + tl.arange(0, BLOCK_K // 32)
    inside = inside_n[:, None] & (group < groups)[None, :]
    place = row_n[:, None] * groups + group[None, :]
    scale = decode_scale(tl.load(scale_ptr + place, mask=inside, other=0))
    byte_ptr = weight_ptr + place[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    codes = tl.load(byte_ptr, mask=inside[:, :, None], other=0)
    values = tl.interleave(decode_e2m1(codes & 15), decode_e2m1(codes >> 4)) * scale[:, :, None]
    return tl.trans(tl.reshape(values, (BLOCK_N, BLOCK_K)))
