"""One of two copies that share experts, on a make-believe GPU: with steps that have no tokens, and in graphs as large as
the other one's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.step import CommonStep, ScheduledRows, StepPlan
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.in_process import InProcessExecutor
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.communicators import Communicators
from pagefleet_engine.ranks.group import Alone, Reduction
from pagefleet_engine.ranks.parallelism import All2All
from pagefleet_engine.startup import StartupTimes
from torch import Tensor

from tests.engine.gpu_path.conftest import serve
from tests.engine.gpu_path.test_serving import RESULT

MOVING: dict[str, Any] = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_step_interval": 8,
    "eplb_window_size": 8,
}
MAY_WAIT = {
    "allgather_reducescatter": {RESULT},
    "all2allv": {RESULT, "pagefleet_engine.layers.moe.exchange.AllToAllExchange.prepare"},
}


class Mirrored(Alone):
    """The first of two ranks, whose other one has the same rows, and gives zeros for those that it is sent."""

    size = 2

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        return x.mul_(2) if reduction == "sum" else x

    def gather_rows(self, x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[: len(x) // 2].clone()

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat([x[: rows[0][0]], x.new_zeros(rows[1][0], *x.shape[1:])])


class OneOfTwo(InProcessExecutor):
    """Before each step it takes part in one that has no tokens here."""

    def __init__(
        self, backend: All2All, config: EngineConfig, folder: Path, arch: ModelArch, times: StartupTimes
    ) -> None:
        parallel = replace(config.parallel, data_parallel_size=2, all2all_backend=backend, **MOVING)
        super().__init__(replace(config, parallel=parallel), folder, arch, times, Communicators(data=Mirrored()))

    def launch(self, plan: StepPlan) -> PendingStep:
        common = self._agreed(plan)
        super().launch(StepPlan(plan.step_id, (), (), ScheduledRows.of(()), 0, common=common))
        return super().launch(replace(plan, common=common))

    def _agreed(self, plan: StepPlan) -> CommonStep:
        """The other one has a few tokens more, or a prompt."""
        num_tokens, longest = plan.num_tokens + plan.step_id % 3, max([*plan.rows.new, 1 + (plan.step_id % 5 == 4)])
        return CommonStep(num_tokens=num_tokens, is_uniform=longest == 1, is_cascade=plan.num_common_blocks > 0)


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2allv"])
def test_copies_that_share_experts_serve(backend: All2All, make_checkpoint: Callable[..., Path]) -> None:
    own = partial(OneOfTwo, backend)
    with patch("pagefleet_engine.engine_core.build.InProcessExecutor", own):
        served = serve(make_checkpoint("qwen3_moe", dtype="bfloat16"), batches=3)
    assert bool(served.graphs) == (backend == "allgather_reducescatter"), "what else is sent has sizes of its own"
    known = {*MAY_WAIT[backend], "pagefleet_engine.worker.expert_balance.ExpertBalancer.before_step"}
    assert [wait for wait in served.waits if known.isdisjoint(wait.callers)] == []
    if backend == "allgather_reducescatter":
        assert served.late_forms == []
