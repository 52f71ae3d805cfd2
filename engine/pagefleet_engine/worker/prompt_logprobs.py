"""Log-probabilities of prompt tokens, chunk by chunk, for the requests that ask.

Shapes: T tokens of the step, S rows, M prompt tokens described, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_engine.core.step import NewRow, ScheduledRow, TokenLogprobs
from pagefleet_engine.worker.logprobs import describe_tokens

MAX_LOGITS = 1 << 24
"""Logits that exist at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: Sequence[int]
    num_top: int


class PromptLogprobs:
    """The prompts that want log-probabilities."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """`compute_logits`: hidden states [S, D] to logits [S, V]."""
        self._compute_logits = compute_logits
        self._rows_at_once = max(1, MAX_LOGITS // vocab_size)
        self._prompts: dict[str, _Prompt] = {}

    def add(self, new: NewRow) -> None:
        """A request enters. With output at hand its prompt was described before a preemption, and is not again."""
        num_top = new.sampling.prompt_logprobs
        if num_top is not None and len(new.token_ids) == new.num_prompt_tokens:
            self._prompts[new.request_id] = _Prompt(new.token_ids, num_top)

    def remove(self, request_id: str) -> None:
        """A request leaves."""
        self._prompts.pop(request_id, None)

    def of_step(
        self, rows: Sequence[ScheduledRow], first_token_S1: NDArray[np.int64], hidden_TD: Tensor
    ) -> dict[str, list[TokenLogprobs] | None]:
        """Entries of the prompt tokens that this step's hidden states predict: those one further than it computes.

        Args:
            rows: the step's rows.
            first_token_S1: where each row's tokens start among the T.
            hidden_TD: the step's hidden states.

        Returns:
            Request id -> entries in order of position, or None when its logits are not numbers.
        """
        found: dict[str, list[TokenLogprobs] | None] = {}
        if not self._prompts:
            return found
        for index, row in enumerate(rows):
            prompt = self._prompts.get(row.request_id)
            if prompt is None:
                continue
            first = row.num_computed_tokens + 1
            targets = prompt.token_ids[first : first + row.num_new_tokens]
            if targets:
                start = int(first_token_S1[index])
                found[row.request_id] = self._describe(hidden_TD[start : start + len(targets)], targets, prompt.num_top)
        return found

    def _describe(self, hidden_MD: Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs] | None:
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), self._rows_at_once):
            part = targets[start : start + self._rows_at_once]
            logits_LV = self._compute_logits(hidden_MD[start : start + len(part)]).float()
            if not bool(logits_LV.amax().isfinite()):
                return None
            entries += describe_tokens(logits_LV, part, [num_top] * len(part))
        return entries
