"""Pairs of row and expert in blocks of one expert each, for products of a fixed shape.

Rows are sorted by expert, and blocks are padded; nothing of it is known to the host. Source of the form: Gale et al.,
MegaBlocks, arXiv 2211.15841.

Shapes: R rows, K experts of each, P = R * K pairs of row and expert, E experts, M rows of a block, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagefleet_kernels import reference_experts
from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.early_launch import early_launch, wait_for_inputs
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import MatmulTile, launch_table

_SCAN = 1024
MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBlocks:
    """Pairs of row and expert, sorted by expert."""

    pairs_BM: torch.Tensor
    """int32 [B, M], `row * K + place`; P or more: padding. Of blocks without an expert it holds anything."""
    experts_B: torch.Tensor
    """int32, the expert of each block; -1: there is none, nor after it."""
    num_pairs: int
    tile: MatmulTile


def align_experts(
    experts_RK: torch.Tensor, num_experts: int, *, tile: MatmulTile | None = None, backend: Backend | None = None
) -> ExpertBlocks:
    """Sort the pairs of int32 `experts_RK` by expert; those of an expert below 0 are in no block."""
    num_pairs, device = experts_RK.numel(), experts_RK.device
    if experts_RK.dtype != torch.int32 or not experts_RK.is_contiguous() or not 0 < num_experts <= MAX_EXPERTS:
        raise UnsupportedShapeError(
            f"experts must be contiguous int32 of 1 to {MAX_EXPERTS}, not {experts_RK.dtype} of {num_experts}"
        )
    if tile is None:
        rows = -(-num_pairs // num_experts)
        tile = next(tile for tile in launch_table(architecture(device)).experts if rows <= tile.max_rows)
    m = tile.block_m
    num_blocks = min(num_pairs, num_pairs // m + num_experts)  # each block has a pair, and each expert one part block
    if choose_backend(device, backend) == "torch":
        return ExpertBlocks(*reference_experts.align_experts(experts_RK, num_experts, m, num_blocks), num_pairs, tile)
    pairs_BM = torch.empty((num_blocks, m), dtype=torch.int32, device=device)
    experts_B = torch.empty(num_blocks, dtype=torch.int32, device=device)
    if num_pairs:
        counts_E, options = torch.empty(num_experts, dtype=torch.int32, device=device), early_launch(device)
        _count_kernel[(num_experts,)](counts_E, experts_RK, num_pairs, SCAN=_SCAN, **options, **COMPILE_OPTIONS)
        _place_kernel[(num_experts,)](
            pairs_BM,
            experts_B,
            counts_E,
            experts_RK,
            num_pairs,
            num_blocks,
            EXPERTS=num_experts,
            PADDED_EXPERTS=next_power_of_2(num_experts),
            BLOCK_M=m,
            SCAN=_SCAN,
            **options,
            **COMPILE_OPTIONS,
        )
    return ExpertBlocks(pairs_BM, experts_B, num_pairs, tile)


@jit(do_not_specialize=("num_pairs",))
def _count_kernel(counts_ptr, experts_ptr, num_pairs, SCAN: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per expert: how many pairs it has."""
    wait_for_inputs(EARLY)
    expert = tl.program_id(0)
    index = tl.arange(0, SCAN)
    count = tl.zeros((SCAN,), tl.int32)
    for start in range(0, num_pairs, SCAN):
        found = tl.load(experts_ptr + start + index, mask=index < num_pairs - start, other=-1)
        count += (found == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(count, axis=0))


@jit(do_not_specialize=("num_pairs", "num_blocks"))
def _place_kernel(  # type: ignore[no-untyped-def]
    pairs_ptr,
    block_experts_ptr,
    counts_ptr,
    experts_ptr,
    num_pairs,
    num_blocks,
    EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per expert: its pairs into its blocks, in their own order; the last one also ends the blocks."""
    wait_for_inputs(EARLY)
    expert = tl.program_id(0)
    other = tl.arange(0, PADDED_EXPERTS)
    counts = tl.load(counts_ptr + other, mask=other < EXPERTS, other=0)
    held = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(other < expert, held, 0), axis=0)
    after = first + tl.sum(tl.where(other == expert, held, 0), axis=0)
    index = tl.arange(0, SCAN)
    for start in range(first, after, SCAN):
        tl.store(block_experts_ptr + start + index, expert + index * 0, mask=index < after - start)
    if expert == EXPERTS - 1:
        for start in range(after, num_blocks, SCAN):
            tl.store(block_experts_ptr + start + index, index * 0 - 1, mask=index < num_blocks - start)
    place = first * BLOCK_M
    for start in range(0, num_pairs, SCAN):
        found = tl.load(experts_ptr + start + index, mask=index < num_pairs - start, other=-1)
        own = (found == expert).to(tl.int32)
        tl.store(pairs_ptr + place + tl.cumsum(own, axis=0) - 1, start + index, mask=own > 0)
        place += tl.sum(own, axis=0)
    padding = place + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + padding, num_pairs + padding * 0, mask=padding < after * BLOCK_M)
