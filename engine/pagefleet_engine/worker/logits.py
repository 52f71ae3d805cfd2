"""Changes to logits before temperature: allowed ids, bad words, min tokens, logit bias, penalties, in that order.

What stays the same from step to step is flattened into index tensors once per set of rows; each step adds what depends
on the output so far. Rows that ask for nothing cost nothing.

Shapes: S rows that sample, V vocabulary. A flat index is row * V + token id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.core.step import NewRow
from pagefleet_engine.worker.token_counts import TokenCounts

Int64Array = NDArray[np.int64]

NEGATIVE_INFINITY = float("-inf")


class RowEdits:
    """What one request changes in its logits, and as much of its output as that needs.

    Token ids outside the vocabulary are dropped: they cannot be sampled anyway.
    """

    def __init__(self, new: NewRow, vocab_size: int) -> None:
        p = new.sampling
        self.allowed = _known(p.allowed_token_ids, vocab_size) if p.allowed_token_ids is not None else None
        words = [word for word in p.bad_words_token_ids if word and max(word) < vocab_size]
        self.banned = _known([word[0] for word in words if len(word) == 1], vocab_size)
        bias = {token: value for token, value in (p.logit_bias or {}).items() if token < vocab_size}
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.repetition, self.presence, self.frequency = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        self._words = [word for word in words if len(word) > 1]
        self._stops = _known({*new.eos_token_ids, *p.stop_token_ids}, vocab_size)
        self._min_tokens = p.min_tokens
        self._num_outputs = 0
        self._tail: list[int] = []
        self._tail_len = max((len(word) - 1 for word in self._words), default=0)
        self.counts = _counts(new)
        for token in new.token_ids[new.num_prompt_tokens :]:
            self.append(token)

    @staticmethod
    def needed(new: NewRow) -> bool:
        """True when the request changes its logits at all."""
        p = new.sampling
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        listed = p.allowed_token_ids is not None or bool(p.bad_words_token_ids) or bool(p.logit_bias)
        return penalised or listed or p.min_tokens > 0

    @property
    def changes(self) -> bool:
        """True while the ids banned depend on the output."""
        return bool(self._words) or self._num_outputs < self._min_tokens

    def append(self, token_id: int) -> None:
        """Take in one output token."""
        self._num_outputs += 1
        if self.counts is not None:
            self.counts.append(token_id)
        if self._tail_len:
            self._tail = [*self._tail, token_id][-self._tail_len :]

    def banned_now(self) -> Int64Array:
        """Ids banned because of where the output stands: ends before `min_tokens`, last tokens of begun bad words."""
        begun = [word[-1] for word in self._words if tuple(self._tail[-(len(word) - 1) :]) == tuple(word[:-1])]
        words = np.array(begun, dtype=np.int64)
        return np.concatenate([words, self._stops]) if self._num_outputs < self._min_tokens else words


class LogitEdits:
    """The edits of a set of rows, prepared for a device."""

    def __init__(self, rows: Sequence[tuple[int, RowEdits]], vocab_size: int, device: torch.device) -> None:
        """`rows`: (row in the logits, its edits), of the rows that have any."""
        self._vocab_size = vocab_size
        self._device = device
        allowed = [(row, edits.allowed) for row, edits in rows if edits.allowed is not None]
        self._restricted_rows = self._index([np.array([row], dtype=np.int64) for row, _ in allowed])
        self._allowed = self._index(row * vocab_size + ids for row, ids in allowed)
        self._banned = self._index(row * vocab_size + edits.banned for row, edits in rows)
        self._biased = self._index(row * vocab_size + edits.bias_ids for row, edits in rows)
        self._bias = torch.from_numpy(np.concatenate([edits.bias for _, edits in rows])).to(device)
        self._changing = [(row, edits) for row, edits in rows if edits.changes]
        self._penalised = [(row, edits, edits.counts) for row, edits in rows if edits.counts is not None]

    def apply_(self, logits_SV: Tensor) -> None:
        """Edit float32 contiguous logits in place."""
        flat = logits_SV.view(-1)
        if len(self._restricted_rows):
            kept = flat[self._allowed]
            logits_SV.index_fill_(0, self._restricted_rows, NEGATIVE_INFINITY)
            flat[self._allowed] = kept
        if len(self._banned):
            flat.index_fill_(0, self._banned, NEGATIVE_INFINITY)
        if self._changing:
            banned = self._index(row * self._vocab_size + edits.banned_now() for row, edits in self._changing)
            flat.index_fill_(0, banned, NEGATIVE_INFINITY)
        if len(self._biased):
            flat.index_add_(0, self._biased, self._bias)
        if self._penalised:
            self._apply_penalties_(flat)

    def _apply_penalties_(self, flat: Tensor) -> None:
        """Repetition divides what is positive and multiplies what is not (Keskar et al. 2019); the others subtract."""
        counts = [counts for _, _, counts in self._penalised]
        index = self._index(row * self._vocab_size + counts.token_ids for row, _, counts in self._penalised)
        weights = np.array([(e.repetition, e.presence, e.frequency) for _, e, _ in self._penalised], dtype=np.float32)
        per_token = np.repeat(weights, [len(c.token_ids) for c in counts], axis=0)
        num_output = np.concatenate([c.output_counts for c in counts])
        subtract = per_token[:, 1] * (num_output > 0) + per_token[:, 2] * num_output
        repetition = torch.from_numpy(np.ascontiguousarray(per_token[:, 0])).to(self._device)
        values = flat[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[index] = values.sub_(torch.from_numpy(subtract.astype(np.float32)).to(self._device))

    def _index(self, parts: Iterable[Int64Array]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *parts])).to(self._device)


def _counts(new: NewRow) -> TokenCounts | None:
    p = new.sampling
    if p.repetition_penalty != 1.0:
        return TokenCounts(new.token_ids[: new.num_prompt_tokens])
    return TokenCounts(()) if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0 else None


def _known(token_ids: Iterable[int], vocab_size: int) -> Int64Array:
    return np.array(sorted({token for token in token_ids if token < vocab_size}), dtype=np.int64)
