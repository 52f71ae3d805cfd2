"""What a forward pass reads, made on the device from a few integers per row, so that the host sends nothing else.

Shapes: S slots of the request table, L its tokens per slot, G groups of KV layers, B blocks per table, R rows of the
step, T tokens of the step, W staged writes. Launch sizes come from the host's numbers: nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, architecture, choose_backend
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.tuning import launch_table

_PROGRAMS_PER_WRITE = 4  # a long prompt is one write: its programs take turns over its tiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBuffers:
    """Where `prepare_step` writes: tensors for the largest step, whose addresses never change."""

    token_ids_T: torch.Tensor
    """int64 [T]."""
    positions_T: torch.Tensor
    """int64 [T]."""
    slot_mappings_GT: torch.Tensor
    """int64 [G, T]: where each group of layers writes a token's keys and values; -1 is padding."""
    query_start_loc_R1: torch.Tensor
    """int32 [R + 1]."""
    seq_lens_R: torch.Tensor
    """int32 [R]; 0 is padding."""
    tables_GRB: torch.Tensor
    """int32 [G, R, B]; only the entries that a row uses are written."""

    @classmethod
    def allocate(
        cls, num_groups: int, max_rows: int, max_tokens: int, max_blocks: int, device: torch.device
    ) -> StepBuffers:
        """Zeros, slots -1. `max_blocks` bounds one table."""
        return cls(
            token_ids_T=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            positions_T=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            slot_mappings_GT=torch.full((num_groups, max_tokens), -1, dtype=torch.int64, device=device),
            query_start_loc_R1=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            seq_lens_R=torch.zeros(max_rows, dtype=torch.int32, device=device),
            tables_GRB=torch.zeros((num_groups, max_rows, max_blocks), dtype=torch.int32, device=device),
        )


def scatter_writes(
    arena_A: torch.Tensor, writes_W3: torch.Tensor, values_V: torch.Tensor, *, backend: Backend | None = None
) -> None:
    """`arena[destination : destination + length] = values[source : source + length]` for every staged write, in place.

    `arena` and `values` are flat int32, `writes` int64 rows of (destination, source, length). Writes must not overlap.
    """
    if arena_A.dim() != 1 or values_V.dim() != 1 or writes_W3.dim() != 2 or writes_W3.shape[1] != 3:
        raise UnsupportedShapeError(
            f"staged writes need a flat arena and values, and [W, 3] writes, not {list(arena_A.shape)}, "
            f"{list(values_V.shape)} and {list(writes_W3.shape)}"
        )
    if not (arena_A.is_contiguous() and values_V.is_contiguous() and writes_W3.is_contiguous()):
        raise UnsupportedShapeError("staged writes, their values and the arena must be contiguous")
    if choose_backend(arena_A.device, backend) == "torch":
        _scatter_writes_by_torch(arena_A, writes_W3, values_V)
        return
    if writes_W3.shape[0] == 0:
        return
    _scatter_writes_kernel[(writes_W3.shape[0], _PROGRAMS_PER_WRITE)](
        arena_A,
        writes_W3,
        values_V,
        BLOCK=launch_table(architecture(arena_A.device)).tile_elements,
        PROGRAMS=_PROGRAMS_PER_WRITE,
        **COMPILE_OPTIONS,
    )


def prepare_step(
    tokens_SL: torch.Tensor,
    block_tables_GSB: torch.Tensor,
    rows_R4: torch.Tensor,
    block_size: int,
    buffers: StepBuffers,
    num_tokens: int,
    *,
    backend: Backend | None = None,
) -> None:
    """Write the first `num_tokens` tokens and R rows of `buffers` from the request table.

    A row is (slot, computed tokens, new tokens, its first token in the batch), int32; rows lie in the order of their
    tokens. A row of slot -1 is padding: its tokens have id 0, position 0 and slot -1, and its sequence is 0 long. So
    are the tokens from the last row's end to `num_tokens`. Positions must be in the table: the device does not check.
    """
    _check(tokens_SL, block_tables_GSB, rows_R4, buffers, num_tokens)
    if choose_backend(tokens_SL.device, backend) == "torch":
        _prepare_step_by_torch(tokens_SL, block_tables_GSB, rows_R4, block_size, buffers, num_tokens)
        return
    num_groups, num_rows = block_tables_GSB.shape[0], rows_R4.shape[0]
    block = min(1024, launch_table(architecture(tokens_SL.device)).tile_elements)
    num_tiles = (num_tokens + block - 1) // block
    _prepare_step_kernel[(num_tiles + num_groups * num_rows,)](
        buffers.token_ids_T,
        buffers.positions_T,
        buffers.slot_mappings_GT,
        buffers.query_start_loc_R1,
        buffers.seq_lens_R,
        buffers.tables_GRB,
        tokens_SL,
        block_tables_GSB,
        rows_R4,
        num_rows,
        num_tokens,
        num_tiles,
        buffers.slot_mappings_GT.stride(0),
        buffers.tables_GRB.stride(0),
        buffers.tables_GRB.stride(1),
        tokens_SL.stride(0),
        block_tables_GSB.stride(0),
        block_tables_GSB.stride(1),
        GROUPS=num_groups,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        SEARCH_STEPS=next_power_of_2(buffers.seq_lens_R.shape[0]).bit_length(),
        **COMPILE_OPTIONS,
    )


def _check(
    tokens_SL: torch.Tensor,
    block_tables_GSB: torch.Tensor,
    rows_R4: torch.Tensor,
    buffers: StepBuffers,
    num_tokens: int,
) -> None:
    """Only what costs nothing: this runs in every step."""
    if tokens_SL.dim() != 2 or block_tables_GSB.dim() != 3 or tokens_SL.shape[0] != block_tables_GSB.shape[1]:
        raise UnsupportedShapeError(
            f"tokens {list(tokens_SL.shape)} and block tables {list(block_tables_GSB.shape)} must be [S, L] and "
            "[G, S, B] with equal S"
        )
    groups, max_rows, max_blocks = buffers.tables_GRB.shape
    if groups != block_tables_GSB.shape[0] or max_blocks < block_tables_GSB.shape[2]:
        raise UnsupportedShapeError(
            f"buffers of {groups} groups of {max_blocks} blocks do not hold tables {list(block_tables_GSB.shape)}"
        )
    if (
        rows_R4.dim() != 2
        or rows_R4.shape[1] != 4
        or not rows_R4.is_contiguous()
        or not 0 < rows_R4.shape[0] <= max_rows
    ):
        raise UnsupportedShapeError(f"rows must be contiguous [R, 4], R 1 to {max_rows}, not {list(rows_R4.shape)}")
    if num_tokens > buffers.token_ids_T.shape[0]:
        raise UnsupportedShapeError(f"{num_tokens} tokens do not fit buffers of {buffers.token_ids_T.shape[0]}")


def _scatter_writes_by_torch(arena_A: torch.Tensor, writes_W3: torch.Tensor, values_V: torch.Tensor) -> None:
    """Twin of `scatter_writes`."""
    destination, source, length = writes_W3.unbind(1)
    starts = length.cumsum(0) - length
    index = torch.arange(int(length.sum()), device=arena_A.device)
    arena_A[index + (destination - starts).repeat_interleave(length)] = values_V[
        index + (source - starts).repeat_interleave(length)
    ]


def _prepare_step_by_torch(
    tokens_SL: torch.Tensor,
    block_tables_GSB: torch.Tensor,
    rows_R4: torch.Tensor,
    block_size: int,
    buffers: StepBuffers,
    num_tokens: int,
) -> None:
    """Twin of `prepare_step`. Tables are gathered to the width of the longest row."""
    if tokens_SL.device.type != "cpu":  # an oracle only: by way of the host
        names = [field.name for field in fields(buffers)]
        host = replace(buffers, **{name: getattr(buffers, name).cpu() for name in names})
        _prepare_step_by_torch(tokens_SL.cpu(), block_tables_GSB.cpu(), rows_R4.cpu(), block_size, host, num_tokens)
        for name in names:
            getattr(buffers, name).copy_(getattr(host, name))
        return
    tables = block_tables_GSB.numpy()
    slots, computed, new, first = rows_R4.numpy().T
    num_rows = len(slots)
    end = int(first[-1] + new[-1])
    is_real = slots >= 0
    seq_lens = (computed + new) * is_real
    buffers.seq_lens_R.numpy()[:num_rows] = seq_lens
    starts = buffers.query_start_loc_R1.numpy()
    starts[:num_rows] = first
    starts[num_rows] = end
    width = -(-int(seq_lens.max()) // block_size)
    buffers.tables_GRB.numpy()[:, :num_rows, :width] = tables[:, slots, :width]

    # slot -1 reads the last slot's row at position 0, which is there, and is overwritten below
    if (new == 1).all():
        slots_T, positions = slots, computed * is_real
    else:
        row = np.repeat(np.arange(num_rows), new)
        slots_T, is_real = slots[row], is_real[row]
        positions = (np.arange(end) + (computed - first)[row]) * is_real
    column, offset = np.divmod(positions, block_size)
    places = tables[:, slots_T, column] * np.int64(block_size) + offset
    ids = tokens_SL.numpy()[slots_T, positions]
    if not is_real.all():
        places[:, ~is_real] = -1
        ids[~is_real] = 0
    for buffer, values, rest in (
        (buffers.token_ids_T.numpy(), ids, 0),
        (buffers.positions_T.numpy(), positions, 0),
        (buffers.slot_mappings_GT.numpy(), places, -1),
    ):
        buffer[..., :end] = values
        if end < num_tokens:
            buffer[..., end:num_tokens] = rest


@jit()
def _scatter_writes_kernel(  # type: ignore[no-untyped-def]
    arena_ptr, writes_ptr, values_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):
    write_ptr = writes_ptr + tl.program_id(0) * 3
    destination = tl.load(write_ptr)
    source = tl.load(write_ptr + 1)
    length = tl.load(write_ptr + 2)
    for start in range(tl.program_id(1) * BLOCK, length, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + source + index, mask=index < length)
        tl.store(arena_ptr + destination + index, values, mask=index < length)


@jit(do_not_specialize=("num_rows", "num_tokens", "num_tiles"))
def _prepare_step_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,
    positions_ptr,
    slot_mappings_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_tables_ptr,
    tokens_ptr,
    tables_ptr,
    rows_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    stride_slots_group,
    stride_out_group,
    stride_out_row,
    stride_tokens_slot,
    stride_tables_group,
    stride_tables_slot,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """The first programs take a tile of tokens each, the others one table of one row."""
    program = tl.program_id(0)
    if program < num_tiles:
        _prepare_tokens(
            token_ids_ptr,
            positions_ptr,
            slot_mappings_ptr,
            tokens_ptr,
            tables_ptr,
            rows_ptr,
            program * BLOCK + tl.arange(0, BLOCK),
            num_rows,
            num_tokens,
            stride_slots_group,
            stride_tokens_slot,
            stride_tables_group,
            stride_tables_slot,
            GROUPS,
            BLOCK_SIZE,
            SEARCH_STEPS,
        )
    else:
        row = (program - num_tiles) // GROUPS
        group = ((program - num_tiles) % GROUPS).to(tl.int64)
        _prepare_row(
            query_start_loc_ptr,
            seq_lens_ptr,
            out_tables_ptr + group * stride_out_group + row.to(tl.int64) * stride_out_row,
            tables_ptr + group * stride_tables_group,
            rows_ptr,
            row,
            group,
            num_rows,
            stride_tables_slot,
            BLOCK_SIZE,
            BLOCK,
        )


@jit()
def _prepare_tokens(  # type: ignore[no-untyped-def]
    token_ids_ptr,
    positions_ptr,
    slot_mappings_ptr,
    tokens_ptr,
    tables_ptr,
    rows_ptr,
    token,
    num_rows,
    num_tokens,
    stride_slots_group,
    stride_tokens_slot,
    stride_tables_group,
    stride_tables_slot,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """Ids, positions and slots of a tile of tokens."""
    row = _row_of_token(rows_ptr, token, num_rows, SEARCH_STEPS)
    found = row >= 0
    row_ptr = rows_ptr + row * 4
    slot = tl.load(row_ptr, mask=found, other=-1).to(tl.int64)
    index = token - tl.load(row_ptr + 3, mask=found, other=0)
    real = (slot >= 0) & (index < tl.load(row_ptr + 2, mask=found, other=0))
    position = tl.where(real, tl.load(row_ptr + 1, mask=found, other=0) + index, 0).to(tl.int64)
    token_id = tl.load(tokens_ptr + slot * stride_tokens_slot + position, mask=real, other=0)
    inside = token < num_tokens
    tl.store(token_ids_ptr + token, token_id.to(tl.int64), mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    entry_ptr = tables_ptr + slot * stride_tables_slot + position // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        block = tl.load(entry_ptr + group * stride_tables_group, mask=real, other=0).to(tl.int64)
        place = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mappings_ptr + group * stride_slots_group + token, place, mask=inside)


@jit()
def _prepare_row(  # type: ignore[no-untyped-def]
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    tables_ptr,
    rows_ptr,
    row,
    group,
    num_rows,
    stride_tables_slot,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One table of one row; both table pointers are at the group already, `out_ptr` at the row too."""
    slot = tl.load(rows_ptr + row * 4).to(tl.int64)
    num_new = tl.load(rows_ptr + row * 4 + 2)
    first = tl.load(rows_ptr + row * 4 + 3)
    seq_len = tl.where(slot >= 0, tl.load(rows_ptr + row * 4 + 1) + num_new, 0)
    if group == 0:
        tl.store(seq_lens_ptr + row, seq_len)
        tl.store(query_start_loc_ptr + row, first)
        if row == num_rows - 1:
            tl.store(query_start_loc_ptr + num_rows, first + num_new)
    table_ptr = tables_ptr + slot * stride_tables_slot
    used = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(0, used, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + column, tl.load(table_ptr + column, mask=column < used), mask=column < used)


@jit()
def _row_of_token(rows_ptr, token, num_rows, SEARCH_STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Last row that begins at or before each token, by binary search; -1 if none does."""
    low = tl.full(token.shape, -1, tl.int32)
    high = tl.zeros(token.shape, tl.int32) + num_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        searching = high - low > 1
        first = tl.load(rows_ptr + middle * 4 + 3, mask=searching, other=0)
        before = searching & (first <= token)
        low = tl.where(before, middle, low)
        high = tl.where(searching & (first > token), middle, high)
    return low
