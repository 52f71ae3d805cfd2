"""Turns logits into tokens on the device: plug-ins, mask, edits, temperature, min-p, top-k, top-p, one draw per row.

Order as in vLLM, but plug-ins come first: what a mask or an edit bans nobody brings back. Log-probabilities are those
of the logits before all this. Greedy rows take part in the edits only. Random rows use Gumbel-max with noise keyed by
(seed, output position, token id), so a row's token depends on its own logits and parameters and on nothing else in the
batch. What the host knows of the requests decides which kernels run; it never waits for one.

Shapes: R rows that sample, L of them that want log-probabilities, V vocabulary, S slots, M tokens per slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.sampling import sample_natively
from pagefleet_kernels.sampling import sample_tokens
from pagefleet_kernels.sampling_edits import History
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import NOT_NUMBERS, NOTHING_LEFT, VocabularyPart
from pagefleet_kernels.token_mask import mask_tokens_
from torch import Tensor

from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.logits_processors import LogitsProcessor, ProcessorTable
from pagefleet_engine.worker.logprobs import PendingLogprobs, start_logprobs
from pagefleet_engine.worker.sampling_table import SamplingTable

__all__ = ["NOTHING_LEFT", "NOT_NUMBERS", "DeviceSamples", "SampleRows", "Sampler"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleRows:
    """The rows to sample for, on both sides. A row's length counts the token whose logits these are."""

    slots: NDArray[np.int64]
    slots_R: Tensor
    """int64."""
    lens: NDArray[np.int64]
    lens_R: Tensor
    """int32."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSamples:
    """One entry per row of the logits."""

    token_ids_R: Tensor
    """int32: NOT_NUMBERS where the logits hold NaN or infinity, NOTHING_LEFT where no token may be taken."""
    logprobs: PendingLogprobs | None
    """Of the rows that ask."""
    failed: frozenset[int] = frozenset()
    """Rows that a logits processor gave up on, whatever token they got."""


class Sampler:
    """Samples for the requests in its slots."""

    def __init__(
        self,
        vocab_size: int,
        engine_seed: int,
        tokens_SM: Tensor,
        kernels: Backend | Library | None = None,
        processors: Mapping[str, LogitsProcessor] = MappingProxyType({}),
    ) -> None:
        """`tokens_SM`: int32, the slots' tokens, where sampled ones are added; `kernels` forces Triton or the twins, or
        are the compiled ones of a CPU."""
        device = tokens_SM.device
        table = ProcessorTable(processors, device)
        self._native = kernels if isinstance(kernels, Library) else None
        self._kernels: Backend | None = None if isinstance(kernels, Library) else kernels
        self._table = SamplingTable(len(tokens_SM), vocab_size, engine_seed, device, table, self._kernels)
        self._tokens_SM = tokens_SM

    def add(self, slot: int, new: NewRow) -> None:
        """A request enters."""
        self._table.add(slot, new)

    def remove(self, slot: int) -> None:
        """A request leaves."""
        self._table.remove(slot)

    def put_out(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens of a request's output that were not sampled."""
        self._table.counts.put_out(slot, token_ids)

    def needs_part(self, rows: SampleRows) -> bool:
        """Whether each rank needs the logits of its own tokens alone, as long as no row has a mask."""
        batch = self._table.batch(rows.slots)
        return (
            batch.processed is None
            and batch.edits is None
            and not batch.rows.any_truncated
            and not len(batch.logprob_rows)
        )

    def sample(
        self,
        logits_RV: Tensor,
        rows: SampleRows,
        allowed_RW: Tensor | None = None,
        part: VocabularyPart | None = None,
    ) -> DeviceSamples:
        """Draw a token for each row and put it after the tokens of its slot, where it is one.

        May write into `logits_RV` (any float type). `allowed_RW`: int32, see `token_mask`; None: all tokens are.
        `part`: whose logits these are, where `needs_part`.
        """
        batch, counts = self._table.batch(rows.slots), self._table.counts
        raw_LV = logits_RV.index_select(0, batch.logprob_rows_L) if len(batch.logprob_rows) else None
        history = History(self._tokens_SM, rows.slots_R, rows.lens_R)
        failed: frozenset[int] = frozenset()
        if batch.processed is not None:
            logits_RV, failed = batch.processed.apply(logits_RV, history, rows.lens)
        if allowed_RW is not None:
            mask_tokens_(logits_RV, allowed_RW, backend=self._kernels)
        if batch.edits is not None:
            logits_RV = batch.edits.apply(logits_RV, counts.table, history, rows.lens)
        counts_PV = None if batch.count_row_R is None else counts.table
        record = TokenRecord(self._tokens_SM, rows.slots_R, counts_PV, batch.count_row_R)
        if self._native is not None and part is None:
            token_ids_R = sample_natively(self._native, logits_RV, batch.rows, rows.lens_R, record)
        else:
            token_ids_R = sample_tokens(logits_RV, batch.rows, rows.lens_R, record, part=part, backend=self._kernels)
        if raw_LV is None:
            return DeviceSamples(token_ids_R, None, failed)
        tokens_L = token_ids_R.index_select(0, batch.logprob_rows_L)
        logprobs = start_logprobs(raw_LV, tokens_L, batch.logprob_rows, batch.num_top)
        return DeviceSamples(token_ids_R, logprobs, failed)
