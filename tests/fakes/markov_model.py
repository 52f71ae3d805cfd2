"""A model without attention: a token's logits are a row of a table, so every expected value can be read off.

Its arithmetic is a lookup, so its logits are the same to the last bit in any batch. The hidden state is the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep, BatchGeometry, Pages
from pagefleet_engine.core.step import CommonStep, NewRow, ScheduledRow, ScheduledRows, StepPlan, StepResult
from pagefleet_engine.ranks.stages import Stage
from pagefleet_engine.ranks.turns import Turns
from pagefleet_engine.worker.forward import EagerForward, Forward
from pagefleet_engine.worker.halves import HalvedForward
from pagefleet_engine.worker.model_runner import ModelRunner, RequestState, RunnerLimits
from pagefleet_kernels.dispatch import Backend
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

EOS = 2
BLOCK_SIZE = 4


class NoAttention:
    """A backend that only notes the geometry of the steps; steps are not to be used."""

    def __init__(self) -> None:
        self.batches: list[BatchGeometry] = []

    def begin(self, batch: BatchGeometry) -> AttentionStep:
        """Note the batch."""
        self.batches.append(batch)
        return _NoStep()


class _NoStep:
    def write(self, spec: AttentionSpec, k_TKH: Tensor, v_TKH: Tensor | None) -> None:
        raise AssertionError("this model has no attention")

    def pages(self, spec: AttentionSpec) -> Pages:
        raise AssertionError("this model has no attention")

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        raise AssertionError("this model has no attention")


class MarkovModel:
    """Logits of the token after `t` are `table_VV[t]`."""

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV
        self.num_logit_rows: list[int] = []
        """Rows of each call of `logits`."""

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        """[T, V]."""
        assert entering.shape == positions_T.shape
        return self.table_VV[entering]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """[S, V]."""
        self.num_logit_rows.append(len(hidden_SD))
        return hidden_SD.clone()


class Requests:
    """Makes plans for a runner by hand: tokens known, tokens computed and blocks of each request."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._num_blocks: dict[str, int] = {}
        self._next_block = 0
        self._entering: list[NewRow] = []
        self._leaving: list[str] = []
        self._num_steps = 0

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams, output: Sequence[int] = ()) -> None:
        """Enter a request; `output`: tokens from before a preemption."""
        self.tokens[name] = [*prompt, *output]
        self._computed[name] = self._num_blocks[name] = 0
        self._entering.append(NewRow(name, tuple(self.tokens[name]), len(prompt), sampling, (EOS,)))

    def remove(self, name: str) -> None:
        """Let a request go with the next step."""
        del self.tokens[name]
        self._leaving.append(name)

    def step(self, *names: str, chunk: int = 10_000, in_halves: bool = False) -> StepResult:
        """Compute up to `chunk` tokens of each of these requests (by default all), in this order."""
        rows = [self._row(name, chunk) for name in names or tuple(self.tokens)]
        num_tokens = sum(row.num_new_tokens for row in rows)
        scheduled = ScheduledRows.of(rows)
        common = CommonStep(num_tokens=num_tokens, is_uniform=num_tokens == len(rows), in_halves=in_halves)
        plan = StepPlan(self._num_steps, self._leaving, self._entering, scheduled, num_tokens, common=common)
        self._num_steps += 1
        self._leaving, self._entering = [], []
        result = self.runner.execute(plan)
        for row, sampled in zip(rows, result.sampled, strict=True):
            self.tokens[row.request_id] += sampled
        return result

    def _row(self, name: str, chunk: int) -> ScheduledRow:
        computed, known = self._computed[name], len(self.tokens[name])
        num_new = min(chunk, known - computed)
        self._computed[name] = computed + num_new
        missing = -(-self._computed[name] // BLOCK_SIZE) - self._num_blocks[name]
        blocks = range(self._next_block, self._next_block + max(0, missing))
        self._next_block += len(blocks)
        self._num_blocks[name] += len(blocks)
        return ScheduledRow(name, computed, num_new, (blocks,), computed + num_new == known)


def make_runner(
    model: MarkovModel,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    seed: int = 0,
    kernels: Backend | None = None,
    backend: NoAttention | None = None,
    stage: Stage | None = None,
    turns: Turns | None = None,
) -> ModelRunner:
    """A runner for steps of up to 256 tokens on the CPU; with `turns` it computes some in halves, as plans say."""
    limits = RunnerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        vocab_size=len(model.table_VV),
    )
    pool = torch.zeros(1_000, 1, 2, 1, BLOCK_SIZE, 2)
    state = RequestState(limits, seed, pool.device, kernels, stage=stage)
    eager = EagerForward(model, backend or NoAttention())
    forward: Forward = eager if turns is None else HalvedForward(eager, eager, turns)
    return ModelRunner(model, forward, pool, state, limits.vocab_size)
