"""Twins of `step_inputs` and `nonfinite`. On a CPU they are in every step's path, so those of inputs are numpy.

Shapes as in `step_inputs`. numpy's calls cost a third of torch's on arrays of a few rows.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from pagefleet_kernels.step_inputs import StepBuffers


def scatter_writes(arena_A: torch.Tensor, writes_W3: torch.Tensor, values_V: torch.Tensor) -> None:
    """Twin of `step_inputs.scatter_writes`."""
    destination, source, length = writes_W3.unbind(1)
    starts = length.cumsum(0) - length
    index = torch.arange(int(length.sum()), device=arena_A.device)
    arena_A[index + (destination - starts).repeat_interleave(length)] = values_V[
        index + (source - starts).repeat_interleave(length)
    ]


def prepare_step(
    tokens_SL: torch.Tensor,
    block_tables_GSB: torch.Tensor,
    rows_R4: torch.Tensor,
    block_size: int,
    buffers: StepBuffers,
    num_tokens: int,
) -> None:
    """Twin of `step_inputs.prepare_step`. Tables are gathered to the width of the longest row."""
    if tokens_SL.device.type != "cpu":  # an oracle only: by way of the host
        names = [field.name for field in fields(buffers)]
        host = replace(buffers, **{name: getattr(buffers, name).cpu() for name in names})
        prepare_step(tokens_SL.cpu(), block_tables_GSB.cpu(), rows_R4.cpu(), block_size, host, num_tokens)
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


def flag_nonfinite(hidden_TD: torch.Tensor) -> torch.Tensor:
    """Twin of `nonfinite.flag_nonfinite`."""
    return ~hidden_TD.sum(1, dtype=torch.float32).isfinite()


def scrub_slots(pool: torch.Tensor, slot_mappings_GT: torch.Tensor, bad_T: torch.Tensor) -> None:
    """Twin of `nonfinite.scrub_slots`."""
    if not bool(bad_T.any()):
        return
    slots = slot_mappings_GT[:, bad_T].flatten()
    slots = slots[slots >= 0]
    block_size = pool.shape[4]
    pool[slots // block_size, :, :, :, slots % block_size] = 0
