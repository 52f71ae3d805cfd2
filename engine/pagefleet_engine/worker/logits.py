"""Changes to logits before temperature: allowed ids, bad words, min tokens, logit bias, penalties.

What a request lists goes to the device once, when it enters; what depends on its output is found there, from its tokens
and counts. What the host knows, how many tokens there are, decides what runs. Rows that ask for nothing cost nothing.

Shapes: R rows that sample, V vocabulary. A flat index is row * V + token id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.sampling_edits import (
    BadWords,
    History,
    ListedTokens,
    Penalties,
    ban_bad_words_,
    edit_listed,
    penalise_,
)
from pagefleet_kernels.sampling_rows import send
from torch import Tensor

from pagefleet_engine.core.step import NewRow

Int64Array = NDArray[np.int64]

NEGATIVE_INFINITY = float("-inf")


class RowEdits:
    """What one request changes in its logits.

    Token ids outside the vocabulary are dropped: they cannot be sampled anyway.
    """

    def __init__(self, new: NewRow, vocab_size: int, device: torch.device) -> None:
        p = new.sampling
        words = [word for word in p.bad_words_token_ids if word and max(word) < vocab_size]
        listed, bias = _listed(new, [word[0] for word in words if len(word) == 1], vocab_size)
        self.restricted = p.allowed_token_ids is not None
        self.listed = send(listed, device)
        self.bias = send(bias, device)
        self.words = [word for word in words if len(word) > 1]
        self.ends = send(_known({*new.eos_token_ids, *p.stop_token_ids}, vocab_size), device)
        self.min_tokens = p.min_tokens
        self.prompt_len = new.num_prompt_tokens
        self.penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)

    @staticmethod
    def needed(new: NewRow) -> bool:
        """True when the request changes its logits at all."""
        p = new.sampling
        listed = p.allowed_token_ids is not None or bool(p.bad_words_token_ids) or bool(p.logit_bias)
        return penalised(new) or listed or p.min_tokens > 0

    @property
    def first_counted(self) -> int:
        """Place of the first token that a penalty may look at."""
        return self.prompt_len if self.penalties[0] == 1.0 else 0


def penalised(new: NewRow) -> bool:
    """True when the request has penalties, and so needs counts."""
    p = new.sampling
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, eq=False)
class EditedRow:
    """A row of a batch with edits."""

    row: int
    edits: RowEdits
    count_row: int
    """In the table of counts; -1 without penalties."""


class LogitEdits:
    """The edits of a set of rows, joined on a device."""

    def __init__(
        self, rows: Sequence[EditedRow], vocab_size: int, device: torch.device, kernels: Backend | None = None
    ) -> None:
        """`rows`: those that have any; `kernels` forces Triton or the twins."""
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels
        self._listed = self._join_lists([row for row in rows if row.edits.restricted or len(row.edits.listed)])
        self._bad_words = self._join_words(rows)
        self._bounded = [row for row in rows if row.edits.min_tokens > 0]
        self._early: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0, dtype=torch.int64, device=device))
        penalised_rows = [row for row in rows if row.count_row >= 0]
        self._penalised = np.array([row.row for row in penalised_rows], dtype=np.int64)
        self._first_counted = np.array([row.edits.first_counted for row in penalised_rows], dtype=np.int64)
        self._penalties = self._join_penalties(penalised_rows)

    def apply(self, logits_RV: Tensor, counts_PV: Tensor, history: History, lens: Int64Array) -> Tensor:
        """Edited logits in float32, contiguous; may write into `logits_RV`.

        `lens` are `history.lens_R` as the host knows them.
        """
        if self._listed is None:
            logits_RV = logits_RV.float().contiguous()
        else:
            logits_RV = edit_listed(logits_RV, self._listed, backend=self._kernels)
        self._ban_ends_(logits_RV, lens)
        if self._bad_words is not None:
            ban_bad_words_(logits_RV, self._bad_words, history, backend=self._kernels)
        if self._penalties is not None:
            most = int((lens[self._penalised] - self._first_counted).max())
            if most > 0:
                penalise_(logits_RV, self._penalties, counts_PV, history, most, backend=self._kernels)
        return logits_RV

    def _ban_ends_(self, logits_RV: Tensor, lens: Int64Array) -> None:
        """Ban what ends an answer in rows that are short of `min_tokens`."""
        if not self._bounded:
            return
        early = [row for row in self._bounded if lens[row.row] - row.edits.prompt_len < row.edits.min_tokens]
        places = tuple(row.row for row in early)
        if places != self._early[0]:
            self._early = places, self._join((row.row, row.edits.ends) for row in early)
        logits_RV.view(-1).index_fill_(0, self._early[1], NEGATIVE_INFINITY)

    def _join_lists(self, rows: Sequence[EditedRow]) -> ListedTokens | None:
        if not rows:
            return None
        restricted = np.array([row.row for row in rows if row.edits.restricted], dtype=np.int64)
        return ListedTokens(
            index_N=self._join((row.row, row.edits.listed) for row in rows),
            bias_N=torch.cat([row.edits.bias for row in rows]),
            restricted_Q=send(restricted, self._device),
        )

    def _join_words(self, rows: Sequence[EditedRow]) -> BadWords | None:
        words = [(row, word) for row in rows for word in row.edits.words]
        if not words:
            return None
        backwards = np.full((len(words), max(len(word) for _, word in words)), -1, dtype=np.int32)
        for place, (_, word) in enumerate(words):
            backwards[place, : len(word)] = word[::-1]
        return BadWords(
            words_WM=send(backwards, self._device),
            row_W=self._send(row.row for row, _ in words),
            prompt_len_W=self._send(row.edits.prompt_len for row, _ in words),
        )

    def _join_penalties(self, rows: Sequence[EditedRow]) -> Penalties | None:
        if not rows:
            return None
        weights = np.array([row.edits.penalties for row in rows], dtype=np.float32)
        return Penalties(
            row_E=send(self._penalised, self._device),
            count_row_E=self._send(row.count_row for row in rows),
            first_E=send(self._first_counted, self._device),
            weights_3E=send(np.ascontiguousarray(weights.T), self._device),
        )

    def _join(self, parts: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Flat index of (row, token ids) pairs."""
        empty = torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.cat([empty, *(ids + row * self._vocab_size for row, ids in parts)])

    def _send(self, values: Iterable[int]) -> Tensor:
        return send(np.fromiter(values, dtype=np.int64), self._device)


def _listed(new: NewRow, banned: Sequence[int], vocab_size: int) -> tuple[Int64Array, NDArray[np.float32]]:
    """Ids with their bias, -inf for a ban; where ids are restricted, those that are allowed."""
    p = new.sampling
    change = {token: value for token, value in (p.logit_bias or {}).items() if token < vocab_size}
    change.update(dict.fromkeys(banned, NEGATIVE_INFINITY))
    ids = _known(change if p.allowed_token_ids is None else p.allowed_token_ids, vocab_size)
    bias = np.zeros(len(ids), dtype=np.float32)
    if change:
        tokens = np.array(sorted(change), dtype=np.int64)
        values = np.array([change[token] for token in tokens.tolist()], dtype=np.float32)
        inside = np.isin(tokens, ids, assume_unique=True)
        bias[np.searchsorted(ids, tokens[inside])] = values[inside]
    return ids, bias


def _known(token_ids: Iterable[int], vocab_size: int) -> Int64Array:
    ids = np.unique(np.fromiter(token_ids, dtype=np.int64))
    return ids[ids < vocab_size]
