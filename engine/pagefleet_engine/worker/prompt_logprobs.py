"""Log-probabilities of prompt tokens, chunk by chunk, for the requests that ask; launched with a step, read after it.

Shapes: T tokens of the step, S rows, M prompt tokens described, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pagefleet_kernels.sampling_rows import send
from torch import Tensor

from pagefleet_engine.core.step import NewRow, ScheduledRows, TokenLogprobs
from pagefleet_engine.worker.logprobs import MAX_LOGITS, describe_tokens, join_parts, read_entries
from pagefleet_engine.worker.transfer import Download, start_download


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class _Described:
    """Entries of one prompt in one step."""

    download: Download
    num_top: int
    num_tokens: int

    def collect(self) -> list[TokenLogprobs] | None:
        *arrays, usable = self.download.wait()
        return read_entries(arrays, [self.num_top] * self.num_tokens) if usable.all() else None


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """Entries of one step."""

    described: dict[str, _Described]

    def collect(self) -> dict[str, list[TokenLogprobs] | None]:
        """Request id -> entries in order of position, or None when its logits are not numbers; waits for the step."""
        return {request_id: described.collect() for request_id, described in self.described.items()}


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

    def launch(
        self, rows: ScheduledRows, first_token_S1: NDArray[np.int64], hidden_TD: Tensor
    ) -> PendingPromptLogprobs | None:
        """Describe the prompt tokens that this step's hidden states predict: those one further than it computes.

        Args:
            rows: the step's rows.
            first_token_S1: where each row's tokens start among the T.
            hidden_TD: the step's hidden states.

        Returns:
            What to read when the step is done; None when no row of the step asks.
        """
        if not self._prompts:
            return None
        found: dict[str, _Described] = {}
        for index, request_id in enumerate(rows.request_ids):
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue
            first = int(rows.computed[index]) + 1
            targets = prompt.token_ids[first : first + int(rows.new[index])]
            if targets:
                start = int(first_token_S1[index])
                found[request_id] = self._describe(hidden_TD[start : start + len(targets)], targets, prompt.num_top)
        return PendingPromptLogprobs(found) if found else None

    def _describe(self, hidden_MD: Tensor, targets: Sequence[int], num_top: int) -> _Described:
        """A few rows at a time: the logits of a long prompt are larger than the model."""
        targets_M = send(np.array(targets, dtype=np.int32), hidden_MD.device)
        parts: list[list[Tensor]] = []
        for start in range(0, len(targets), self._rows_at_once):
            part = slice(start, start + self._rows_at_once)
            logits_LV = self._compute_logits(hidden_MD[part]).float()
            usable_L = logits_LV.amax(1).isfinite()
            parts.append([*describe_tokens(logits_LV, targets_M[part], num_top), usable_L])
        return _Described(start_download(join_parts(parts), hidden_MD.device), num_top, len(targets))
