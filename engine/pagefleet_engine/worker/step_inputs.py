"""Builds what a forward pass reads: ragged token inputs and the geometry of attention, without a loop over tokens.

The tensors of a step are views of buffers whose addresses never change (CUDA graphs will need that). On the CPU host
and device buffer are one; on CUDA the host's is pinned and copied without waiting.

Shapes: T tokens of the step, S rows, R rows that sample, B blocks per table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.attention.backend import BatchGeometry
from pagefleet_engine.core.step import ScheduledRow
from pagefleet_engine.worker.input_batch import InputBatch, Int64Array


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass; valid until the next is built."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    geometry: BatchGeometry
    sampling_rows: Int64Array
    """[R], rows of the plan that sample."""
    last_token_R: Tensor
    """int64 [R], where the last token of each of them stands among the T."""
    first_token_S1: Int64Array
    """[S + 1], where each row's tokens start among the T."""


class StepInputBuilder:
    """Owns the buffers for steps of at most `max_tokens` tokens in `max_rows` rows."""

    def __init__(self, batch: InputBatch, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self._batch = batch
        self._token_ids = _Buffer(max_tokens, torch.int64, device)
        self._positions = _Buffer(max_tokens, torch.int64, device)
        self._slot_mapping = _Buffer(max_tokens, torch.int64, device)
        self._query_start_loc = _Buffer(max_rows + 1, torch.int32, device)
        self._seq_lens = _Buffer(max_rows, torch.int32, device)
        self._block_tables = _Buffer(max_rows * batch.max_blocks, torch.int32, device)
        self._last_token = _Buffer(max_rows, torch.int64, device)

    def build(self, rows: Sequence[ScheduledRow], slots_S: Int64Array) -> StepInputs:
        """Inputs of a plan's rows; `slots_S` are theirs in the input batch, block tables already extended."""
        batch, num_rows = self._batch, len(rows)
        computed_S = np.fromiter((row.num_computed_tokens for row in rows), np.int64, num_rows)
        new_S = np.fromiter((row.num_new_tokens for row in rows), np.int64, num_rows)
        samples_S = np.fromiter((row.samples for row in rows), np.bool_, num_rows)
        seq_S = computed_S + new_S
        blocks_S = -(-seq_S // batch.block_size)
        known_S = batch.num_tokens(slots_S)
        assert (new_S > 0).all(), "a row computes nothing"
        assert (seq_S <= known_S).all(), "a row computes tokens that are not known"
        assert (samples_S == (seq_S == known_S)).all(), "a row samples exactly when its last known token is computed"
        assert (blocks_S <= batch.num_blocks(slots_S)).all(), "a row has too few blocks"

        first_S1 = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(new_S, out=first_S1[1:])
        num_tokens = int(first_S1[-1])
        slots_T = np.repeat(slots_S, new_S)
        positions_T = np.arange(num_tokens) + np.repeat(computed_S - first_S1[:-1], new_S)
        column_T = positions_T // batch.block_size
        block_T = batch.blocks_at(slots_T, column_T).astype(np.int64)
        slot_mapping_T = (block_T - column_T) * batch.block_size + positions_T
        sampling_rows = np.flatnonzero(samples_S)
        geometry = BatchGeometry(
            query_start_loc_S1=self._query_start_loc.put(first_S1),
            seq_lens_S=self._seq_lens.put(seq_S),
            block_tables=(self._block_tables.put(batch.block_tables(slots_S, int(blocks_S.max()))),),
            slot_mappings=(self._slot_mapping.put(slot_mapping_T),),
            max_query_len=int(new_S.max()),
            query_lens=new_S.tolist(),
            seq_lens=seq_S.tolist(),
        )
        return StepInputs(
            token_ids_T=self._token_ids.put(batch.tokens_at(slots_T, positions_T)),
            positions_T=self._positions.put(positions_T),
            geometry=geometry,
            sampling_rows=sampling_rows,
            last_token_R=self._last_token.put(first_S1[sampling_rows + 1] - 1),
            first_token_S1=first_S1,
        )


class _Buffer:
    """A flat host buffer and its twin on the device."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.empty(size, dtype=dtype, pin_memory=not on_host)
        self._device = self._host if on_host else torch.empty(size, dtype=dtype, device=device)
        self._array: NDArray[np.generic] = self._host.numpy()

    def put(self, values: NDArray[np.generic]) -> Tensor:
        """Store an array; returns it on the device, in its shape."""
        size = values.size
        self._array[:size] = values.reshape(-1)
        if self._device is not self._host:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._device[:size].view(values.shape)
