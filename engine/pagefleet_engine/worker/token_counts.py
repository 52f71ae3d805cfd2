"""Which tokens a request has seen and how often it has put them out, on the device: what penalties are computed from.

Only requests with penalties have a row of the table, which doubles when they get more. Sampling adds the output tokens
to it, so the host never learns of them. Layout of a count: `pagefleet_kernels.sampling_edits`.

Shapes: P rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pagefleet_kernels.sampling_rows import send
from torch import Tensor

_FIRST_ROWS = 4


class TokenCounts:
    """Rows for those of `num_slots` slots that need one."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._device = device
        self._table_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def table(self) -> Tensor:
        """int32 [P, V], contiguous; another tensor after `add` when it had to grow."""
        return self._table_PV

    def row(self, slot: int) -> int:
        """Place of a slot in the table; -1 if it has none."""
        return self._rows.get(slot, -1)

    def add(self, slot: int, seen: Sequence[int], output: Sequence[int]) -> None:
        """Give a slot a row. `seen` count as known, `output` as put out; no id may be outside the vocabulary."""
        if not self._free:
            self._grow()
        row = self._rows[slot] = self._free.pop()
        count_V = self._table_PV[row].zero_()
        if len(seen):
            count_V.index_fill_(0, self._ids(seen), 1)
        if len(output):
            ids = self._ids(output)
            count_V.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def remove(self, slot: int) -> None:
        """Take a slot's row back, if it has one."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def _grow(self) -> None:
        held, vocab_size = self._table_PV.shape
        size = min(max(_FIRST_ROWS, 2 * held), self._num_slots)
        table_PV = torch.zeros((size, vocab_size), dtype=torch.int32, device=self._device)
        table_PV[:held] = self._table_PV
        self._table_PV = table_PV
        self._free.extend(range(size - 1, held - 1, -1))

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return send(np.array(token_ids, dtype=np.int64), self._device)
