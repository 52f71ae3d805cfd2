"""Log-probabilities of the model's own distribution, before any sampling parameter changes it.

Launched with the step, read once the step is done.

Shapes: L rows, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.core.step import TokenLogprobs
from pagefleet_engine.worker.transfer import Download, start_download

MAX_LOGITS = 1 << 24
"""Logits that are looked at at once: 64 MiB in float32."""


class PendingLogprobs:
    """Entries of the rows of one batch that ask."""

    def __init__(self, download: Download, rows: Sequence[int], num_top: Sequence[int]) -> None:
        """`download`: what `describe_tokens` gives for L rows; `rows`: their places in the batch."""
        self._download = download
        self._rows = rows
        self._num_top = num_top

    def collect(self) -> dict[int, TokenLogprobs]:
        """Row of the batch -> its entry, for rows that have a token; waits for the step."""
        entries = read_entries(self._download.wait(), self._num_top)
        return {row: entry for row, entry in zip(self._rows, entries, strict=True) if entry.token_ids[0] >= 0}


def start_logprobs(
    logits_LV: Tensor, tokens_L: Tensor, rows: NDArray[np.int64], num_top: Sequence[int]
) -> PendingLogprobs:
    """Describe the tokens of L rows, from unmodified logits of any float type; a negative token is none."""
    at_once = max(1, MAX_LOGITS // logits_LV.shape[1])
    most = max(num_top, default=0)
    parts = [
        describe_tokens(logits_LV[start : start + at_once].float(), tokens_L[start : start + at_once], most)
        for start in range(0, len(tokens_L), at_once)
    ]
    return PendingLogprobs(start_download(join_parts(parts), logits_LV.device), rows.tolist(), num_top)


def describe_tokens(logits_LV: Tensor, tokens_L: Tensor, most: int) -> list[Tensor]:
    """The token of each row, then the `most` likely (it may be among them): ids, log-probabilities, ranks of the token.

    Args:
        logits_LV: unmodified logits; float32.
        tokens_L: int32; a negative one is described as token 0, under its own number.
        most: at least 0.

    Returns:
        ids_LK1: int64, the token first.
        logprobs_LK1: float32.
        rank_L: int64, 1 for the most likely.
    """
    logprobs_LV = torch.log_softmax(logits_LV, dim=1)
    token_L1 = tokens_L.to(torch.int64).unsqueeze(1)
    chosen_L1 = logprobs_LV.gather(1, token_L1.clamp(min=0))
    rank_L = (logprobs_LV > chosen_L1).sum(1).add_(1)
    values_LK, ids_LK = logprobs_LV.topk(min(most, logits_LV.shape[1]), dim=1)
    return [torch.cat([token_L1, ids_LK], dim=1), torch.cat([chosen_L1, values_LK], dim=1), rank_L]


def join_parts(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """Results of `describe_tokens` for some rows after others, as one."""
    return parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def read_entries(arrays: Sequence[NDArray[np.generic]], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The arrays of `describe_tokens` as entries, each with its own number of most likely tokens."""
    ids, values, ranks = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(ids[row][: 1 + k], values[row][: 1 + k], rank)
        for row, (k, rank) in enumerate(zip(num_top, ranks, strict=True))
    ]
