"""Runs step plans on one device: apply the difference, build inputs, forward, sample, append.

Shapes: T tokens of the step, S rows, R rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionBackend, AttentionStep
from pagefleet_engine.core.step import StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.worker.input_batch import InputBatch, Int64Array
from pagefleet_engine.worker.kv_pool import clean_blocks
from pagefleet_engine.worker.prompt_logprobs import PromptLogprobs
from pagefleet_engine.worker.sampler import NOT_NUMBERS, NOTHING_LEFT, Sampler
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepInputs

_FAILURES = {
    NOT_NUMBERS: "the model's output for this request is not a number",
    NOTHING_LEFT: "the request's constraints leave no token to sample",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """Sizes that the buffers are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int


class CausalModel(Protocol):
    """The part of a model that a step needs."""

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """Hidden states [T, D]."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V]."""
        ...


class ModelRunner:
    """One model, its KV pool behind an attention backend, and the requests it works on."""

    def __init__(
        self, model: CausalModel, backend: AttentionBackend, pool: Tensor, limits: RunnerLimits, seed: int
    ) -> None:
        """`pool` is the backend's, on the model's device; `seed` is that of requests that bring none."""
        device = pool.device
        self._model = model
        self._backend = backend
        self._pool = pool
        self._block_size = limits.block_size
        self._batch = InputBatch(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._inputs = StepInputBuilder(self._batch, limits.max_num_seqs, limits.max_num_batched_tokens, device)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size, seed, device)
        self._prompts = PromptLogprobs(model.logits, limits.vocab_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. A request whose logits are unusable is named in `failed`; the others are not affected."""
        slots_S = self._apply(plan)
        inputs = self._inputs.build(plan.rows, slots_S)
        step = self._backend.begin(inputs.geometry)
        hidden_TD = self._model.forward(inputs.token_ids_T, inputs.positions_T, step)
        failed = self._contain(plan, inputs, hidden_TD)
        described = self._prompts.of_step(plan.rows, inputs.first_token_S1, hidden_TD)
        failed |= {name: _FAILURES[NOT_NUMBERS] for name, entries in described.items() if entries is None}
        prompt_logprobs = {name: entries for name, entries in described.items() if entries is not None}
        sampled: list[Sequence[int]] = [()] * len(plan.rows)
        logprobs: dict[str, Sequence[TokenLogprobs]] = {}
        if len(inputs.sampling_rows):
            slots_R = slots_S[inputs.sampling_rows]
            logits_RV = self._model.logits(hidden_TD.index_select(0, inputs.last_token_R))
            result = self._sampler.sample(logits_RV, slots_R)
            for row, token in zip(inputs.sampling_rows.tolist(), result.token_ids, strict=True):
                if token >= 0:
                    sampled[row] = (token,)
                else:
                    failed[plan.rows[row].request_id] = _FAILURES[token]
            for index, entry in result.logprobs.items():
                logprobs[plan.rows[inputs.sampling_rows[index]].request_id] = (entry,)
            self._append(slots_R, result.token_ids)
        return StepResult(sampled, logprobs, prompt_logprobs, failed)

    def release(self, request_ids: Iterable[str]) -> None:
        """Let requests go."""
        for request_id in request_ids:
            self._sampler.remove(self._batch.remove(request_id))
            self._prompts.remove(request_id)

    def _apply(self, plan: StepPlan) -> Int64Array:
        """Take the plan's difference in; returns the slots of its rows."""
        self.release(plan.removed)
        for new in plan.new:
            self._sampler.add(self._batch.add(new), new)
            self._prompts.add(new)
        return self._batch.extend_tables(plan.rows)

    def _contain(self, plan: StepPlan, inputs: StepInputs, hidden_TD: Tensor) -> dict[str, str]:
        """Name the requests whose hidden states are not numbers, and clean what they wrote to their pages.

        Attention reads the unused places of a page too, with weight zero; but zero times NaN is NaN, for whoever gets
        the page next. Found in the step that writes them, such pages never reach the prefix cache.
        """
        bad_T = ~hidden_TD.sum(1, dtype=torch.float32).isfinite()
        if not bool(bad_T.any()):
            return {}
        tokens = bad_T.nonzero().squeeze(1)
        clean_blocks(self._pool, inputs.geometry.slot_mappings[0][tokens] // self._block_size)
        rows = np.searchsorted(inputs.first_token_S1, tokens.cpu().numpy(), side="right") - 1
        return {plan.rows[row].request_id: _FAILURES[NOT_NUMBERS] for row in rows}

    def _append(self, slots_R: Int64Array, token_ids: list[int]) -> None:
        if min(token_ids) < 0:
            kept = [index for index, token in enumerate(token_ids) if token >= 0]
            slots_R, token_ids = slots_R[kept], [token_ids[index] for index in kept]
        self._batch.append(slots_R, token_ids)
        self._sampler.append(slots_R, token_ids)
