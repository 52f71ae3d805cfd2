"""What a forward pass reads. The host says four numbers per row; the device makes the rest from the request table.

All tensors are views of buffers whose addresses never change, so that a captured graph reads the next step's inputs at
the same places.

Shapes: T tokens of the step, S rows, R rows that sample, G KV groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.step_inputs import StepBuffers, prepare_step
from torch import Tensor

from pagefleet_engine.attention.backend import BatchGeometry
from pagefleet_engine.core.step import CommonStep, Int64Array, ScheduledRows
from pagefleet_engine.worker.request_table import RequestTable

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows as arrays on the host, in batch order.

    Made and checked once per step by methods of arrays: numpy's functions for the same cost some thousand instructions
    more each, which shows where the model is small.
    """

    slots_S: Int64Array
    computed_S: Int64Array
    new_S: Int64Array
    first_S1: Int64Array
    """Where each row's tokens start among the T; the last entry is T."""
    sampling_R: Int64Array
    """Indices of the rows that sample."""
    common: CommonStep | None = None
    """See StepPlan."""

    @classmethod
    def of_plan(cls, rows: ScheduledRows, slots_S: Int64Array, common: CommonStep | None = None) -> StepRows:
        """`slots_S` are the rows' in the request table."""
        first_S1 = np.zeros(len(rows) + 1, dtype=np.int64)
        rows.new.cumsum(out=first_S1[1:])
        return cls(slots_S, rows.computed, rows.new, first_S1, rows.samples.nonzero()[0], common)

    @property
    def in_halves(self) -> bool:
        """Whether they are computed as two halves."""
        return self.common is not None and self.common.in_halves

    def check(self, table: RequestTable) -> None:
        """Assert that the rows ask for what the table has."""
        seq_S, known_S = self.seq_lens, table.num_tokens(self.slots_S)
        assert (self.new_S > 0).all(), "a row computes nothing"
        assert (seq_S <= known_S).all(), "a row computes tokens that are not known"
        at_end = (seq_S == known_S).nonzero()[0].tolist() == self.sampling_R.tolist()
        assert at_end, "a row samples exactly when its last known token is computed"
        assert (-(-seq_S // table.block_size) <= table.num_blocks(self.slots_S)).all(), "a row has too few blocks"

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.first_S1[-1])

    @property
    def seq_lens(self) -> Int64Array:
        """Tokens of each row that are known to the device after this step's were computed."""
        return self.computed_S + self.new_S

    @property
    def max_query_len(self) -> int:
        """New tokens of the longest row."""
        return int(self.new_S.max())

    def row_table(self, num_rows: int, num_tokens: int) -> Int32Array:
        """What `prepare_step` reads, filled up to `num_rows` rows of padding.

        Each has one of the tokens that pad the step to `num_tokens` while there are some, the others none.
        """
        held = len(self.slots_S)
        table = np.empty((num_rows, 4), dtype=np.int32)
        table[:held, 0], table[:held, 1], table[:held, 2] = self.slots_S, self.computed_S, self.new_S
        table[:held, 3] = self.first_S1[:-1]
        if num_rows > held:
            num_padding = num_tokens - self.num_tokens
            index = np.arange(num_rows - held)
            table[held:, 0], table[held:, 1], table[held:, 2] = -1, 0, index < num_padding
            table[held:, 3] = self.num_tokens + np.minimum(index, num_padding)
        return table


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass; valid until the next is prepared."""

    entering: Tensor
    """Token ids, int64 [T]; in a stage behind the first what the one before gave, [T, D]."""
    positions_T: Tensor
    """int64."""
    geometry: BatchGeometry


class StepInputBuilder:
    """Owns the buffers for steps of at most `max_tokens` tokens in `max_rows` rows."""

    def __init__(
        self,
        table: RequestTable,
        max_rows: int,
        max_tokens: int,
        kernels: Backend | None = None,
        entering_TD: Tensor | None = None,
    ) -> None:
        """`entering_TD`: the hidden states that a stage behind the first gets, in the place of token ids."""
        self._table = table
        self._entering_TD = entering_TD
        self._kernels = kernels
        num_groups = table.block_tables_GSB.shape[0]
        device = table.tokens_SL.device
        self._buffers = StepBuffers.allocate(num_groups, max_rows, max_tokens, table.max_blocks, device)

    def prepare(self, rows_R4: Tensor, num_tokens: int) -> None:
        """Fill the buffers' first rows and `num_tokens` tokens on the device; see `StepRows.row_table`."""
        table = self._table
        prepare_step(
            table.tokens_SL,
            table.block_tables_GSB,
            rows_R4,
            table.block_size,
            self._buffers,
            num_tokens,
            backend=self._kernels,
        )

    def clear(self) -> None:
        """Leave nothing but padding in the buffers: tokens that are written nowhere, rows without any."""
        buffers = self._buffers
        for tensor in (buffers.token_ids_T, buffers.positions_T, buffers.query_start_loc_R1, buffers.seq_lens_R):
            tensor.zero_()
        buffers.slot_mappings_GT.fill_(-1)
        if self._entering_TD is not None:
            self._entering_TD.zero_()

    def view(self, num_rows: int, num_tokens: int, max_query_len: int) -> StepInputs:
        """The first rows and tokens of the buffers, for any batch of that shape: what a graph is captured over."""
        return self._inputs(num_rows, num_tokens, max_query_len, None, 0)

    def inputs(self, rows: StepRows, num_common_blocks: int = 0) -> StepInputs:
        """Of a batch that is not filled up, with its lengths on the host."""
        return self._inputs(len(rows.slots_S), rows.num_tokens, rows.max_query_len, rows, num_common_blocks)

    def slot_mappings(self, num_tokens: int) -> Tensor:
        """Where the step's first tokens were written, per KV group."""
        return self._buffers.slot_mappings_GT[:, :num_tokens]

    def _inputs(
        self, num_rows: int, num_tokens: int, max_query_len: int, rows: StepRows | None, num_common_blocks: int
    ) -> StepInputs:
        buffers = self._buffers
        geometry = BatchGeometry(
            query_start_loc_S1=buffers.query_start_loc_R1[: num_rows + 1],
            seq_lens_S=buffers.seq_lens_R[:num_rows],
            block_tables=tuple(tables_RB[:num_rows] for tables_RB in buffers.tables_GRB.unbind(0)),
            slot_mappings=tuple(slots_T[:num_tokens] for slots_T in buffers.slot_mappings_GT.unbind(0)),
            max_query_len=max_query_len,
            query_lens=None if rows is None else rows.new_S.tolist(),
            seq_lens=None if rows is None else rows.seq_lens.tolist(),
            num_common_blocks=num_common_blocks,
        )
        entering = buffers.token_ids_T if self._entering_TD is None else self._entering_TD
        return StepInputs(entering[:num_tokens], buffers.positions_T[:num_tokens], geometry)
