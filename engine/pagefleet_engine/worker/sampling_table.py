"""Sampling parameters of the requests that the worker holds: one slot each, gathered into device tensors per batch.

The tensors of a batch are kept until its rows change, so that decoding steps move no parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.logits import LogitEdits, RowEdits
from pagefleet_engine.worker.noise import UInt64Array, request_seed
from pagefleet_engine.worker.truncation import NEGATIVE_INFINITY, Cuts, num_candidates

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: the quotient would leave float32's range."""

_WHOLE_VOCABULARY = 0


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows of a batch that draw at random in the same way."""

    rows_R: Tensor
    """int64, into the batch."""
    rows: NDArray[np.int64]
    num_candidates: int | None
    by_top_k: bool
    inverse_temperature_R1: Tensor
    cuts: Cuts


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of the rows that sample in a step, in their order."""

    slots: NDArray[np.int64]
    groups: tuple[DrawGroup, ...]
    """Every row that is not greedy is in exactly one."""
    edits: LogitEdits | None
    logprob_rows: NDArray[np.int64]
    """Rows that want log-probabilities."""
    num_top: tuple[int, ...]
    """For each of those: how many of the most likely tokens."""


class SamplingTable:
    """One slot per request; slots are those of the input batch."""

    def __init__(self, num_slots: int, vocab_size: int, engine_seed: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._engine_seed = engine_seed
        self._device = device
        self._num_unseeded = 0
        self._temperature = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._log_min_p = np.full(num_slots, NEGATIVE_INFINITY, dtype=np.float32)
        self._draw_key = np.full(num_slots, -1, dtype=np.int64)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._num_outputs = np.zeros(num_slots, dtype=np.int64)
        self._edits: dict[int, RowEdits] = {}
        self._batch: SamplingBatch | None = None

    def add(self, slot: int, new: NewRow) -> None:
        """Fill a slot from a request that has just entered."""
        p = new.sampling
        top_k = p.top_k if 0 < p.top_k < self._vocab_size else 0
        greedy = p.temperature < MIN_TEMPERATURE or top_k == 1
        self._temperature[slot] = p.temperature
        self._top_k[slot] = top_k
        self._top_p[slot] = p.top_p
        self._log_min_p[slot] = math.log(p.min_p) if p.min_p > 0.0 else NEGATIVE_INFINITY
        self._draw_key[slot] = -1 if greedy else _draw_key(top_k, p.top_p)
        self._num_logprobs[slot] = -1 if p.logprobs is None else p.logprobs
        self._seeds[slot] = request_seed(p.seed, self._engine_seed, self._num_unseeded)
        self._num_unseeded += p.seed is None
        self._num_outputs[slot] = len(new.token_ids) - new.num_prompt_tokens
        if RowEdits.needed(new):
            self._edits[slot] = RowEdits(new, self._vocab_size)
        self._batch = None

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        self._edits.pop(slot, None)
        self._batch = None

    def append(self, slots_R: NDArray[np.int64], token_ids: list[int]) -> None:
        """Take in one sampled token for each of these distinct slots."""
        self._num_outputs[slots_R] += 1
        if self._edits:
            for slot, token in zip(slots_R.tolist(), token_ids, strict=True):
                edits = self._edits.get(slot)
                if edits is not None:
                    edits.append(token)

    def seeds_and_positions(self, slots_R: NDArray[np.int64]) -> tuple[UInt64Array, NDArray[np.int64]]:
        """Each row's seed, and the place in its output of the token to draw next."""
        return self._seeds[slots_R], self._num_outputs[slots_R]

    def batch(self, slots_S: NDArray[np.int64]) -> SamplingBatch:
        """The parameters of these slots, rebuilt only when they are not those of the last call."""
        if self._batch is None or not np.array_equal(self._batch.slots, slots_S):
            self._batch = self._build(slots_S.copy())
        return self._batch

    def _build(self, slots_S: NDArray[np.int64]) -> SamplingBatch:
        keys_S = self._draw_key[slots_S]
        groups = [
            self._group(slots_S, np.flatnonzero(keys_S == key), int(key)) for key in np.unique(keys_S[keys_S >= 0])
        ]
        edited = [(row, self._edits[slot]) for row, slot in enumerate(slots_S.tolist()) if slot in self._edits]
        logprob_rows = np.flatnonzero(self._num_logprobs[slots_S] >= 0)
        return SamplingBatch(
            slots=slots_S,
            groups=tuple(groups),
            edits=LogitEdits(edited, self._vocab_size, self._device) if edited else None,
            logprob_rows=logprob_rows,
            num_top=tuple(self._num_logprobs[slots_S[logprob_rows]].tolist()),
        )

    def _group(self, slots_S: NDArray[np.int64], rows: NDArray[np.int64], key: int) -> DrawGroup:
        slots = slots_S[rows]
        size, by_top_k = divmod(key, 2)
        cuts = Cuts(
            top_k_R=self._to_device(self._top_k[slots]),
            top_p_R=self._to_device(self._top_p[slots]),
            log_min_p_R=self._to_device(self._log_min_p[slots]),
        )
        return DrawGroup(
            rows_R=self._to_device(rows),
            rows=rows,
            num_candidates=None if size == _WHOLE_VOCABULARY else size,
            by_top_k=bool(by_top_k),
            inverse_temperature_R1=self._to_device((1.0 / self._temperature[slots]).astype(np.float32)).unsqueeze(1),
            cuts=cuts,
        )

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _draw_key(top_k: int, top_p: float) -> int:
    """Rows of one key draw together: 2 * candidates + (1 where a top-k limits them)."""
    return 2 * (num_candidates(top_k, top_p) or _WHOLE_VOCABULARY) + (top_k > 0)
