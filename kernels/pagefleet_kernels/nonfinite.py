"""Finding tokens whose hidden states are not numbers, and cleaning what they left in the KV pool, without a wait.

Attention multiplies what it masks with zero, and zero times NaN is NaN: a page must be finite before someone else gets
it. Shapes: T tokens, D hidden width, G groups of KV layers.
"""

from __future__ import annotations

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import launch_table

_TOKENS_PER_PROGRAM = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def flag_nonfinite(hidden_TD: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """bool [T]: whether any element of a token is NaN or infinite.

    The twin asks the float32 sum of the token, which is half the work on a CPU: it also flags a sum that overflows.
    """
    if hidden_TD.dim() != 2 or hidden_TD.stride(1) != 1:
        raise UnsupportedShapeError(
            f"hidden states must be [T, D] with a contiguous last axis, not {list(hidden_TD.shape)} "
            f"with strides {hidden_TD.stride()}"
        )
    if choose_backend(hidden_TD.device, backend) == "torch":
        return _flag_nonfinite_by_torch(hidden_TD)
    num_tokens, width = hidden_TD.shape
    bad_T = torch.empty(num_tokens, dtype=torch.bool, device=hidden_TD.device)
    if num_tokens:
        block = min(next_power_of_2(width), launch_table(architecture(hidden_TD.device)).tile_elements)
        _flag_nonfinite_kernel[(num_tokens,)](
            bad_T, hidden_TD, hidden_TD.stride(0), WIDTH=width, BLOCK=block, **COMPILE_OPTIONS
        )
    return bad_T


def scrub_slots(
    pool: torch.Tensor, slot_mappings_GT: torch.Tensor, bad_T: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """Zero, in place, the keys and values of flagged tokens, in all layers and every group.

    `pool` is the whole pool (see `layout`), contiguous and of any dtype; slots are int64, -1 is padding. Where no token
    is flagged a program reads 64 flags and ends.
    """
    if pool.dim() != 6 or not pool.is_contiguous():
        raise UnsupportedShapeError(f"the KV pool must be contiguous, as KVLayout.shape says, not {list(pool.shape)}")
    if slot_mappings_GT.dim() != 2 or slot_mappings_GT.shape[1:] != bad_T.shape or slot_mappings_GT.stride(1) != 1:
        raise UnsupportedShapeError(
            f"slots {list(slot_mappings_GT.shape)} must be [G, T] with a contiguous last axis, and flags [T], "
            f"not {list(bad_T.shape)}"
        )
    if choose_backend(pool.device, backend) == "torch":
        _scrub_slots_by_torch(pool, slot_mappings_GT, bad_T)
        return
    num_groups, num_tokens = slot_mappings_GT.shape
    if num_tokens == 0:
        return
    _, num_layers, vectors, num_heads, block_size, head_dim = pool.shape
    rows = num_layers * vectors * num_heads
    _scrub_slots_kernel[((num_tokens + _TOKENS_PER_PROGRAM - 1) // _TOKENS_PER_PROGRAM,)](
        pool.view(_INTEGERS[pool.element_size()]),  # zero has the same bits in every dtype
        slot_mappings_GT,
        bad_T,
        num_tokens,
        slot_mappings_GT.stride(0),
        GROUPS=num_groups,
        ROWS=rows,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=next_power_of_2(head_dim),
        BLOCK_ROWS=min(16, next_power_of_2(rows)),
        BLOCK=_TOKENS_PER_PROGRAM,
        **COMPILE_OPTIONS,
    )


def _flag_nonfinite_by_torch(hidden_TD: torch.Tensor) -> torch.Tensor:
    """Twin of `flag_nonfinite`. A number less itself is 0, but for infinity and NaN; isfinite takes five passes."""
    sums_T = hidden_TD.sum(1, dtype=torch.float32)
    return (sums_T - sums_T) != 0.0


def _scrub_slots_by_torch(pool: torch.Tensor, slot_mappings_GT: torch.Tensor, bad_T: torch.Tensor) -> None:
    """Twin of `scrub_slots`."""
    if not bool(bad_T.any()):
        return
    slots = slot_mappings_GT[:, bad_T].flatten()
    slots = slots[slots >= 0]
    block_size = pool.shape[4]
    pool[slots // block_size, :, :, :, slots % block_size] = 0


@jit()
def _flag_nonfinite_kernel(  # type: ignore[no-untyped-def]
    bad_ptr, hidden_ptr, stride_token, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(hidden_ptr + token * stride_token + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        bad |= tl.where(tl.abs(x) < float("inf"), 0, 1)  # a comparison with NaN is false
    tl.store(bad_ptr + token, tl.max(bad, axis=0) > 0)


@jit(do_not_specialize=("num_tokens", "stride_group"))
def _scrub_slots_kernel(  # type: ignore[no-untyped-def]
    pool_ptr,
    slot_mappings_ptr,
    bad_ptr,
    num_tokens,
    stride_group,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK tokens. Speed matters only where nothing is bad."""
    first = tl.program_id(0) * BLOCK
    token = first + tl.arange(0, BLOCK)
    flags = tl.load(bad_ptr + token, mask=token < num_tokens, other=0).to(tl.int32)
    if tl.max(flags, axis=0) == 0:
        return
    dim = tl.arange(0, DIM_PADDED)[None, :]
    for index in range(0, BLOCK):
        bad = tl.load(bad_ptr + first + index, mask=first + index < num_tokens, other=0).to(tl.int32)
        for group in tl.static_range(GROUPS):
            slot = tl.load(slot_mappings_ptr + group * stride_group + first + index, mask=bad != 0, other=-1)
            if slot >= 0:
                page_ptr = pool_ptr + ((slot // BLOCK_SIZE) * ROWS * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
                for start in range(0, ROWS, BLOCK_ROWS):
                    row = (start + tl.arange(0, BLOCK_ROWS))[:, None]
                    zeros = tl.zeros((BLOCK_ROWS, DIM_PADDED), pool_ptr.dtype.element_ty)
                    offset = row * BLOCK_SIZE * HEAD_DIM + dim
                    tl.store(page_ptr + offset, zeros, mask=(row < ROWS) & (dim < HEAD_DIM))
