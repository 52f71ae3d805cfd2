"""A request whose numbers overflow must not harm the next owner of its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepPlan
from pagefleet_engine.worker.forward import EagerForward
from pagefleet_engine.worker.model_runner import ModelRunner, RequestState, RunnerLimits
from pagefleet_kernels.layout import KVLayout
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

VOCAB_SIZE = 20
BAD = 13
LAYOUT = KVLayout(num_blocks=4, num_layers=1, num_kv_heads=1, block_size=4, head_dim=8)


SPEC = AttentionSpec(layer=0, scale=0.3)


class OneLayer:
    """Attends over the embeddings themselves; token BAD has one that is not a number."""

    def __init__(self, bad: float) -> None:
        self._table_VD = torch.randn(VOCAB_SIZE, 8, generator=torch.Generator().manual_seed(0))
        self._head_VD = self._table_VD.clone()
        self._table_VD[BAD, 3] = bad

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        x_TNH = self._table_VD[entering].unsqueeze(1)
        step.write(SPEC, x_TNH, x_TNH)
        return (x_TNH + step.attend(SPEC, x_TNH)).squeeze(1)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return hidden_SD @ self._head_VD.T


def make_runner(bad: float) -> tuple[ModelRunner, Tensor]:
    pool = torch.zeros(LAYOUT.shape)
    limits = RunnerLimits(
        max_num_seqs=3, max_num_batched_tokens=32, max_model_len=16, block_size=4, vocab_size=VOCAB_SIZE
    )
    model = OneLayer(bad)
    forward = EagerForward(model, TorchBackend(pool, LAYOUT, group_layers([None] * LAYOUT.num_layers)))
    return ModelRunner(model, forward, pool, RequestState(limits, 0, pool.device), VOCAB_SIZE), pool


def plan_of(name: str, prompt: list[int], num_new: int, removed: tuple[str, ...] = ()) -> StepPlan:
    """All four blocks for one request, of which the step computes `num_new` tokens."""
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    row = ScheduledRow(name, 0, num_new, (range(4),), num_new == len(prompt))
    return StepPlan(1, removed, [NewRow(name, prompt, len(prompt), sampling, ())], ScheduledRows.of([row]), num_new)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_new", [6, 16])
def test_pages_are_clean_for_the_next_request(bad: float, num_new: int) -> None:
    expected = make_runner(bad)[0].execute(plan_of("good", [1, 2, 3, 4, 5, 6], 6))
    runner, pool = make_runner(bad)
    result = runner.execute(plan_of("bad", [1, 2, BAD, 3, 4, BAD, *[5] * 10], num_new))
    assert set(result.failed) == {"bad"}
    assert pool.isfinite().all()
    assert runner.execute(plan_of("good", [1, 2, 3, 4, 5, 6], 6, removed=("bad",))).sampled == expected.sampled


def test_without_cleaning_the_next_request_would_be_harmed() -> None:
    runner, pool = make_runner(math.nan)
    pool[3, 0, 1, 0, 3] = math.nan  # a place of the short request's block that it does not reach
    sampling = SamplingParams(temperature=0.0)
    new = [NewRow("long", [1] * 10, 10, sampling, ()), NewRow("short", [2, 3], 2, sampling, ())]
    rows = [ScheduledRow("long", 0, 10, (range(3),), True), ScheduledRow("short", 0, 2, ([3],), True)]
    assert set(runner.execute(StepPlan(1, (), new, ScheduledRows.of(rows), 12)).failed) == {"short"}


def test_a_request_beside_it_in_the_step_is_not_harmed() -> None:
    """Rows are computed as a batch of the longest one's width; the bad one has the block that tables begin with."""
    prompts = {"bad": ([BAD, 1, 2], range(1)), "short": ([3, 4], range(1, 2)), "long": ([5] * 7, range(2, 4))}

    def run(*names: str) -> dict[str, Sequence[int]]:
        new = [
            NewRow(name, prompts[name][0], len(prompts[name][0]), SamplingParams(temperature=0.0), ()) for name in names
        ]
        rows = [ScheduledRow(name, 0, len(prompts[name][0]), (prompts[name][1],), True) for name in names]
        total = sum(row.num_new_tokens for row in rows)
        result = make_runner(math.nan)[0].execute(StepPlan(1, (), new, ScheduledRows.of(rows), total))
        assert set(result.failed) == {"bad"} & set(names)
        return dict(zip(names, result.sampled, strict=True))

    alone = run("short", "long")
    assert {name: run("bad", "short", "long")[name] for name in alone} == alone
