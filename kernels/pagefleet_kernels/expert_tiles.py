"""What every grouped product of experts does around its sums: which pairs and outputs a program has, and what becomes
of them. Shapes as in `experts`."""

from __future__ import annotations

from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.early_launch import wait_for_inputs
from pagefleet_kernels.expert_gates import add_bias, join_gate


@jit()
def begin_tile(  # type: ignore[no-untyped-def]
    pairs_ptr,
    block_experts_ptr,
    num_pairs,
    num_blocks,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The expert of a program's block, below 0 where it has none; its pairs, and which of them there are; its outputs,
    and which of them there are. Neighbours have the same outputs of mostly one expert, and so share weights."""
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    block = program % num_blocks
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    pair = tl.load(pairs_ptr + block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    n = (program // num_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    return expert, pair, pair < num_pairs, n, n < OUTPUTS


@jit()
def end_tile(  # type: ignore[no-untyped-def]
    out_ptr,
    bias_ptr,
    pair,
    inside_m,
    n,
    inside_n,
    out,
    up,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add the biases of these outputs at `bias_ptr`, join the halves where they are gate and up, and store."""
    out = add_bias(out, bias_ptr, inside_n, HAS_BIAS)
    if GATED:
        out = join_gate(out, add_bias(up, bias_ptr + OUTPUTS, inside_n, HAS_BIAS), KIND)
    tile_ptr = out_ptr + pair.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(tile_ptr, out.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_n[None, :])
