"""One of two copies that share experts, on a make-believe GPU: with steps that have no tokens, in graphs as large as
those of the other one, and in halves that send on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from pagefleet_engine.ranks.turns import Halves, SideStream, Turns, _serve
from pagefleet_engine.startup import StartupTimes
from torch import Tensor

from tests.engine.gpu_path.conftest import serve
from tests.engine.gpu_path.test_serving import RESULT
from tests.fakes.cuda.device import fake_gpu
from tests.fakes.cuda.streams import Race
from tests.fakes.cuda.tensors import DeviceMemory

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

    def __init__(self) -> None:
        self.streams = set[int]()
        """On which rows travelled, since it was cleared."""

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        return x.mul_(2) if reduction == "sum" else x

    def gather_rows(self, x: Tensor) -> Tensor:
        self._note(x)
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[: len(x) // 2].clone()

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        self._note(x)
        return torch.cat([x[: rows[0][0]], x.new_zeros(rows[1][0], *x.shape[1:])])

    def _note(self, x: Tensor) -> None:
        if x.is_cuda:
            self.streams.add(torch.cuda.current_stream().number)  # type: ignore[attr-defined]


class OneOfTwo(InProcessExecutor):
    """Before each step it takes part in one that has no tokens here.

    Attributes:
        travelled: streams on which rows of steps in halves did.
    """

    memory: DeviceMemory
    travelled: set[int]
    divides: bool

    def __init__(
        self, backend: All2All, config: EngineConfig, folder: Path, arch: ModelArch, times: StartupTimes
    ) -> None:
        parallel = replace(config.parallel, data_parallel_size=2, all2all_backend=backend, **MOVING)
        type(self).memory = torch.zeros(1, device="cuda").memory  # type: ignore[attr-defined]
        self._groups = Mirrored(), Mirrored()
        halves = Halves(Turns(side=SideStream()), self._groups[1]) if self.divides else None
        communicators = Communicators(data=self._groups[0], halves=halves)
        super().__init__(replace(config, parallel=parallel), folder, arch, times, communicators)

    def launch(self, plan: StepPlan) -> PendingStep:
        common = self._agreed(plan)
        super().launch(StepPlan(plan.step_id, (), (), ScheduledRows.of(()), 0, common=common))
        common = replace(common, in_halves=self.divides and plan.num_tokens > 3)
        for group in self._groups:
            group.streams.clear()
        launched = super().launch(replace(plan, common=common))
        if common.in_halves:
            assert self._groups[0].streams == self._groups[1].streams, "both halves send on one stream"
            self.travelled |= self._groups[0].streams
        return launched

    def _agreed(self, plan: StepPlan) -> CommonStep:
        """The other one has a few tokens more, or a prompt."""
        num_tokens, longest = plan.num_tokens + plan.step_id % 3, max([*plan.rows.new, 1 + (plan.step_id % 5 == 4)])
        return CommonStep(num_tokens=num_tokens, is_uniform=longest == 1, is_cascade=plan.num_common_blocks > 0)


def one_of_two(*, divides: bool = False) -> type[OneOfTwo]:
    return type("One", (OneOfTwo,), {"divides": divides, "travelled": set()})


@contextmanager
def patched(kind: type[OneOfTwo], backend: All2All) -> Iterator[None]:
    """Engines are of that kind; a thread that computes makes its tensors on the make-believe device too."""

    def serve_there(*arguments: Any) -> None:
        with kind.memory.active():
            _serve(*arguments)

    with (
        patch("pagefleet_engine.engine_core.build.InProcessExecutor", partial(kind, backend)),
        patch("pagefleet_engine.ranks.turns._serve", serve_there),
    ):
        yield


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2allv"])
def test_copies_that_share_experts_serve(backend: All2All, make_checkpoint: Callable[..., Path]) -> None:
    with patched(one_of_two(), backend):
        served = serve(make_checkpoint("qwen3_moe", dtype="bfloat16"), batches=slice(3))
    assert bool(served.graphs) == (backend == "allgather_reducescatter"), "what else is sent has sizes of its own"
    known = {*MAY_WAIT[backend], "pagefleet_engine.worker.expert_balance.ExpertBalancer.before_step"}
    assert [wait for wait in served.waits if known.isdisjoint(wait.callers)] == []
    if backend == "allgather_reducescatter":
        assert served.late_forms == []


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2allv"])
def test_halves_send_on_a_stream_of_their_own(backend: All2All, make_checkpoint: Callable[..., Path]) -> None:
    """And nothing is read before it is there, nor written before it was read: the device would see a race."""
    halved = one_of_two(divides=True)
    with patched(halved, backend):
        served = serve(make_checkpoint("qwen3_moe", dtype="bfloat16"), batches=slice(3))
    if backend == "allgather_reducescatter":
        assert served.late_forms == []
    (side,) = halved.travelled
    assert side > 0, "not the one on which steps are computed"


def test_who_does_not_wait_for_a_stream_is_seen() -> None:
    with fake_gpu():
        side, x = SideStream(), torch.ones(3, device="cuda")
        with side.sending() as came:
            y = x + 1
        with pytest.raises(Race, match="that stream 1 may still write"):
            y.mul_(2)
        with pytest.raises(Race, match="that stream 1 may still read"):
            x.zero_()
        came.wait()
        x.copy_(y * 2)
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(Race, match="that stream 0 may still write"):  # type: ignore[no-untyped-call]
            x + 1
