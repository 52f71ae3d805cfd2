"""The requests that the worker holds: tokens and block tables on the host, one slot per request.

A plan is applied as a difference, so a decoding step touches a few numbers per request. Slots are reused; the order of
a step's rows is the plan's, not the slots'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagefleet_engine.core.step import NewRow, ScheduledRow

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]

_FIRST_WIDTH = 2048


class InputBatch:
    """Token rows and block tables of up to `num_slots` requests.

    Token rows start short and double when a request needs more, up to `max_model_len`; pages that no token was written
    to take no memory.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self._max_model_len = max_model_len
        self._tokens = np.zeros((num_slots, min(max_model_len, _FIRST_WIDTH)), dtype=np.int32)
        self._block_tables = np.zeros((num_slots, self.max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(num_slots, dtype=np.int64)
        self._num_tokens = np.zeros(num_slots, dtype=np.int64)
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, new: NewRow) -> int:
        """Take a request in; returns its slot."""
        assert new.request_id not in self._slots, f"{new.request_id} is held already"
        num_tokens = len(new.token_ids)
        self._reserve(num_tokens)
        slot = self._free.pop()
        self._slots[new.request_id] = slot
        self._tokens[slot, :num_tokens] = new.token_ids
        self._num_tokens[slot] = num_tokens
        return slot

    def remove(self, request_id: str) -> int:
        """Let a request go; returns the slot it had."""
        slot = self._slots.pop(request_id)
        self._block_tables[slot, : self._num_blocks[slot]] = 0
        self._num_blocks[slot] = 0
        self._free.append(slot)
        return slot

    def extend_tables(self, rows: Sequence[ScheduledRow]) -> Int64Array:
        """Append the rows' new blocks; returns the rows' slots, in their order."""
        slots = self._slots
        for row in rows:
            if row.new_blocks:
                slot = slots[row.request_id]
                start = int(self._num_blocks[slot])
                stop = start + len(row.new_blocks[0])
                assert stop <= self.max_blocks, f"{row.request_id} has {stop} blocks, a context {self.max_blocks}"
                self._block_tables[slot, start:stop] = row.new_blocks[0]
                self._num_blocks[slot] = stop
        return np.array([slots[row.request_id] for row in rows], dtype=np.int64)

    def append(self, slots_R: Int64Array, token_ids: Sequence[int]) -> None:
        """Put one token after the last of each of these distinct slots."""
        at = self._num_tokens[slots_R]
        if len(at):
            self._reserve(int(at.max()) + 1)
        self._tokens[slots_R, at] = token_ids
        self._num_tokens[slots_R] += 1

    def tokens_at(self, slots_T: Int64Array, positions_T: Int64Array) -> Int32Array:
        """Token ids by slot and position."""
        return self._tokens[slots_T, positions_T]

    def num_tokens(self, slots_S: Int64Array) -> Int64Array:
        """Known tokens of these slots."""
        return self._num_tokens[slots_S]

    def num_blocks(self, slots_S: Int64Array) -> Int64Array:
        """Length of these slots' block tables."""
        return self._num_blocks[slots_S]

    def block_tables(self, slots_S: Int64Array, width: int) -> Int32Array:
        """The first `width` entries of these slots' block tables [S, width]; 0 past a table's end."""
        return self._block_tables[slots_S, :width]

    def blocks_at(self, slots_T: Int64Array, columns_T: Int64Array) -> Int32Array:
        """Block ids by slot and place in the table."""
        return self._block_tables[slots_T, columns_T]

    def _reserve(self, num_tokens: int) -> None:
        """Widen the rows to hold `num_tokens`."""
        width = self._tokens.shape[1]
        if num_tokens <= width:
            return
        assert num_tokens <= self._max_model_len, f"{num_tokens} tokens in a context of {self._max_model_len}"
        while width < num_tokens:
            width *= 2
        wider = np.zeros((self._tokens.shape[0], min(width, self._max_model_len)), dtype=np.int32)
        for slot in self._slots.values():
            held = self._num_tokens[slot]
            wider[slot, :held] = self._tokens[slot, :held]
        self._tokens = wider
