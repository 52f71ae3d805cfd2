"""Sampling parameters of the requests that the worker holds: one slot each, gathered for the device per batch.

What is gathered is kept until the rows of a batch change, so that decoding steps move no parameters. Requests with
penalties have a row of token counts as well, to which sampling adds the output tokens: the host never learns of them.

Shapes: P rows of counts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.sampling_noise import mix64
from pagefleet_kernels.sampling_rows import RowParameters, SamplingRows, send
from torch import Tensor

from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.logits import EditedRow, LogitEdits, RowEdits, penalised
from pagefleet_engine.worker.logits_processors import ProcessedBatch, ProcessorTable

_FIRST_ROWS = 4


class TokenCounts:
    """Which tokens a request has seen and how often it has put them out, on the device: what penalties need.

    Rows for those of `num_slots` slots that need one, twice as many whenever they run out. Layout of a count:
    `pagefleet_kernels.sampling_edits`.
    """

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
            self._count(count_V, output)

    def put_out(self, slot: int, output: Sequence[int]) -> None:
        """Count tokens of the output that were not sampled, if the slot has a row."""
        if slot in self._rows:
            self._count(self._table_PV[self._rows[slot]], output)

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

    def _count(self, count_V: Tensor, output: Sequence[int]) -> None:
        ids = self._ids(output)
        count_V.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def _ids(self, token_ids: Sequence[int]) -> Tensor:
        return send(np.array(token_ids, dtype=np.int64), self._device)


def request_seed(seed: int | None, engine_seed: int, counter: int) -> int:
    """The 64-bit seed of one request: its own, else one derived from the engine's seed and a running number."""
    if seed is not None:
        return seed % 2**64
    pair = np.array([engine_seed % 2**64, counter], dtype=np.uint64)
    mixed = mix64(pair)
    return int(mix64(mixed[:1] ^ (mixed[1:] << np.uint64(1)))[0])


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Parameters of the rows that sample in a step, in their order."""

    slots: NDArray[np.int64]
    rows: SamplingRows
    processed: ProcessedBatch | None
    edits: LogitEdits | None
    count_row_R: Tensor | None
    """int64, each row's place in the table of counts, -1 without; None when no row has one."""
    logprob_rows: NDArray[np.int64]
    """Rows that want log-probabilities."""
    logprob_rows_L: Tensor
    num_top: tuple[int, ...]
    """For each of those: how many of the most likely tokens."""


class SamplingTable:
    """One slot per request; slots are those of the request table."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        engine_seed: int,
        device: torch.device,
        processors: ProcessorTable,
        kernels: Backend | None = None,
    ) -> None:
        self._processors = processors
        self._vocab_size = vocab_size
        self._engine_seed = engine_seed
        self._device = device
        self._kernels = kernels
        self._num_unseeded = 0
        self._temperature = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._log_min_p = np.full(num_slots, -np.inf, dtype=np.float32)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._prompt_len = np.zeros(num_slots, dtype=np.int64)
        self._edits: dict[int, RowEdits] = {}
        self._batches: list[SamplingBatch] = []
        """The last two: of the rows that are sampled with the step, and of those that are masked."""
        self.counts = TokenCounts(num_slots, vocab_size, device)

    def add(self, slot: int, new: NewRow) -> None:
        """Fill a slot from a request that has just entered."""
        p = new.sampling
        top_k = p.top_k if 0 < p.top_k < self._vocab_size else 0
        greedy = p.temperature == 0.0 or top_k == 1
        self._temperature[slot] = 0.0 if greedy else p.temperature
        self._top_k[slot] = top_k
        self._top_p[slot] = p.top_p
        self._log_min_p[slot] = math.log(p.min_p) if p.min_p > 0.0 else -math.inf
        self._num_logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self._seeds[slot] = request_seed(p.seed, self._engine_seed, self._num_unseeded)
        self._num_unseeded += p.seed is None
        self._prompt_len[slot] = new.num_prompt_tokens
        if RowEdits.needed(new):
            self._edits[slot] = RowEdits(new, self._vocab_size, self._device)
        if penalised(new):
            seen = new.token_ids[: new.num_prompt_tokens] if p.repetition_penalty != 1.0 else ()
            self.counts.add(slot, seen, new.token_ids[new.num_prompt_tokens :])
        self._processors.add(slot, new)
        self._batches.clear()

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        self._edits.pop(slot, None)
        self._processors.remove(slot)
        self.counts.remove(slot)
        self._batches.clear()

    def batch(self, slots: NDArray[np.int64]) -> SamplingBatch:
        """The parameters of these slots, gathered only when they are not those of one of the last two calls."""
        for batch in self._batches:
            if len(batch.slots) == len(slots) and (batch.slots == slots).all():
                return batch
        batch = self._gather(slots.copy())
        self._batches = [*self._batches[-1:], batch]
        return batch

    def _gather(self, slots: NDArray[np.int64]) -> SamplingBatch:
        parameters = RowParameters(
            seed=self._seeds[slots],
            prompt_len=self._prompt_len[slots],
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            log_min_p=self._log_min_p[slots],
        )
        count_rows = np.array([self.counts.row(slot) for slot in slots.tolist()], dtype=np.int64)
        edited = [
            EditedRow(row, self._edits[slot], int(count_rows[row]))
            for row, slot in enumerate(slots.tolist())
            if slot in self._edits
        ]
        logprob_rows = np.flatnonzero(self._num_logprobs[slots] >= 0)
        return SamplingBatch(
            slots=slots,
            rows=SamplingRows(parameters, self._device),
            processed=self._processors.gather(slots),
            edits=LogitEdits(edited, self._vocab_size, self._device, self._kernels) if edited else None,
            count_row_R=send(count_rows, self._device) if (count_rows >= 0).any() else None,
            logprob_rows=logprob_rows,
            logprob_rows_L=send(logprob_rows, self._device),
            num_top=tuple(self._num_logprobs[slots[logprob_rows]].tolist()),
        )
