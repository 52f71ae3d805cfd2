"""Rows of a launched step that wait for their masks: their logits are kept, and sampled by a second call.

Shapes: R rows of the step that sample, M of them that get a mask, W words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from pagefleet_kernels.token_mask import TOKENS_PER_WORD
from torch import Tensor

from pagefleet_engine.core.step import StepMasks
from pagefleet_engine.errors import StepOutOfMemory
from pagefleet_engine.worker.device_timer import IdleTimer
from pagefleet_engine.worker.logprobs import PendingLogprobs
from pagefleet_engine.worker.request_table import RequestTable
from pagefleet_engine.worker.sampler import DeviceSamples, Sampler, SampleRows
from pagefleet_engine.worker.step_inputs import StepRows
from pagefleet_engine.worker.transfer import Array, Download, Upload, start_download


class Drawn(NamedTuple):
    """What was sampled for some rows of a plan."""

    rows: Sequence[int]
    token_ids: Sequence[int]
    """As in `DeviceSamples`."""
    logprobs: PendingLogprobs | None
    failed: frozenset[int]
    """As in `DeviceSamples`."""


@dataclass(frozen=True, slots=True)
class MaskedSampling:
    """The runner's parts that it takes."""

    sampler: Sampler
    table: RequestTable
    upload: Upload
    timer: IdleTimer
    device: torch.device


class MaskedRows:
    """Those of one step."""

    def __init__(self, rows: Sequence[int], step: StepRows, logits_RV: Tensor, sampling: MaskedSampling) -> None:
        """`rows` of `step` are masked; `logits_RV` are those of all that sample."""
        self._rows = rows
        self._step = step
        self._logits_RV: Tensor | None = logits_RV
        self._sampling = sampling
        self._drawn: tuple[Sequence[int], DeviceSamples, Download] | None = None

    @torch.inference_mode()
    def sample(self, masks: StepMasks) -> None:
        """Begin to sample the rows that get a mask; the others sample nothing.

        Raises:
            StepOutOfMemory: the device has no room for it.
        """
        logits_RV, self._logits_RV = self._logits_RV, None
        assert logits_RV is not None, "masked rows are sampled once"
        if len(masks.rows) < len(self._rows):
            without = sorted(set(self._rows) - set(masks.rows))
            self._sampling.table.shrink(self._step.slots_S[without])
        if not masks.rows:
            return
        try:
            self._drawn = self._sample(logits_RV, masks)
            return
        except torch.OutOfMemoryError as error:
            reason = str(error)
        raise StepOutOfMemory(f"the sampling of {len(masks.rows)} masked rows: {reason}")

    def collect(self) -> Drawn | None:
        """Wait for what was sampled; None where nothing was."""
        if self._drawn is None:
            return None
        rows, samples, download = self._drawn
        (token_ids,) = download.wait()
        return Drawn(rows, token_ids.tolist(), samples.logprobs, samples.failed)

    def _sample(self, logits_RV: Tensor, masks: StepMasks) -> tuple[Sequence[int], DeviceSamples, Download]:
        parts, step = self._sampling, self._step
        parts.timer.begin(follows=True)
        rows_M = np.array(masks.rows, dtype=np.int64)
        slots, lens = step.slots_S[rows_M], step.seq_lens[rows_M]
        sent: list[Array] = [slots, lens.astype(np.int32), masks.allowed]
        if is_part := len(rows_M) < len(logits_RV):
            sent.append(step.sampling_R.searchsorted(rows_M))
        if masks.if_likeliest is not None:
            sent.append(masks.if_likeliest)
        slots_M, lens_M, allowed_MW, *more = parts.upload.send(sent)
        logits_MV = logits_RV.index_select(0, more.pop(0)) if is_part else logits_RV
        if more:
            allowed_MW = _with_likeliest(allowed_MW, more[0], logits_MV)
        samples = parts.sampler.sample(
            logits_MV, SampleRows(slots=slots, slots_R=slots_M, lens=lens, lens_R=lens_M), allowed_MW
        )
        download = start_download([samples.token_ids_R], parts.device)
        parts.timer.end()
        return masks.rows, samples, download


def _with_likeliest(allowed_MW: Tensor, more_MW: Tensor, logits_MV: Tensor) -> Tensor:
    """Return masks that allow more where the likeliest token is one of those."""
    top_M1 = logits_MV.argmax(-1, keepdim=True)
    words_M1 = more_MW.gather(1, top_M1 // TOKENS_PER_WORD)
    is_more_M1 = (words_M1 >> (top_M1 % TOKENS_PER_WORD).to(torch.int32)) & 1 != 0
    return torch.where(is_more_M1, allowed_MW | more_MW, allowed_MW)
