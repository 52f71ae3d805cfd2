"""A rank's process without a model: `python rank_process.py`. After token t comes t + 1.

How loading goes is said in the model's name, e.g. `fake?fault=config&rank=1`. A request named `die-1` has rank 1
do that in each of its steps; `-all` has all do it. `late-0` has the first stage of several fail once its step is out,
at SIGUSR1; `until-1` computes until then. A request `loud` is told of `LOUD`.
With a request `meet` the ranks of each stage then wait for each other, and with `pass` each stage for the
one before; both need `fake?others=1`. With `fake?device=1` the last stage has a device.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagefleet_engine.core.step import StepMasks, StepPlan, StepResult
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError, StepOutOfMemory
from pagefleet_engine.executor.messages import Loaded, RankStart, digest
from pagefleet_engine.executor.rank_loop import BuiltRank
from pagefleet_engine.executor.rank_memory import REPLY_BYTES
from pagefleet_engine.executor.rank_process import run_rank
from pagefleet_engine.executor.vital_signs import Awaited, OwnSigns
from pagefleet_engine.startup import StartupTimes

from tests.fakes.scripted_core import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, CountedStep, CountingExecutor

LOUD = [1 << 16] * (REPLY_BYTES // 4)
"""Tokens of more bytes than a ring has."""
BYTES_PER_BLOCK = 4
"""Keys and values of two layers."""
ERRORS = {
    "config": ConfigError("one thing is wrong: do another"),
    "model": ModelLoadError("/m is damaged: download it again"),
    "memory": MemoryError(),
    "oom": StepOutOfMemory("no room"),
    "raise": ValueError("a bad step"),
    "astray": EngineDead("a step came that was not to come"),
}


def _refuse() -> None:
    raise RuntimeError("CUPTI is in use")


def misbehave(fault: str) -> None:
    match fault:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
        case "spin" | "long":
            until = time.process_time() + (3.0 if fault == "long" else 1e9)
            while time.process_time() < until:
                pass
        case "until":
            while signal.sigtimedwait({signal.SIGUSR1}, 0) is None:
                pass
        case _ if fault in ERRORS:
            raise ERRORS[fault]


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A step that another stage samples."""

    plan: StepPlan
    is_computed: bool = True

    def sample(self, masks: StepMasks) -> None:
        pass

    def result(self) -> StepResult:
        if any(row.request_id == "late-0" for row in self.plan.rows):
            signal.sigwait({signal.SIGUSR1})
            raise ValueError("a late fault")
        return StepResult([()] * len(self.plan.rows))


class LastStage(CountingExecutor):
    """That samples."""

    def launch(self, plan: StepPlan) -> CountedStep:
        step = super().launch(plan)
        loud = [index for index, row in enumerate(plan.rows) if row.request_id == "loud"]
        outcome = replace(
            step.outcome, sampled=[LOUD if at in loud else one for at, one in enumerate(step.outcome.sampled)]
        )
        return replace(step, outcome=outcome)


class WithDevice(LastStage):
    """Whose device computes apart from it, and never comes out of a step of a request `endless`."""

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int:
        return 0

    def launch(self, plan: StepPlan) -> CountedStep:
        if any(row.request_id == "endless" for row in plan.rows):
            self.is_computed = False
        return super().launch(plan)


class EarlierStage(CountingExecutor):
    """Of a pipeline; it is done with a step whether or not its masks have come."""

    def launch(self, plan: StepPlan) -> PassedOn:  # type: ignore[override]
        super().launch(plan)
        return PassedOn(plan)


class Others:
    """The other ranks, for tests that ask for them: each process takes a second to import torch."""

    def __init__(self, start: RankStart, signs: OwnSigns) -> None:
        from pagefleet_engine.executor.ring_channel import RingInlet, RingOutlet
        from pagefleet_engine.ranks.shared_memory import SharedGroup

        shared, stage = start.shared, signs.awaiting(Awaited.STAGE)
        peers, tensor = signs.awaiting(Awaited.TENSOR), shared.tensor
        self._inlet = None if shared.inlet is None else RingInlet(shared.inlet, stage)
        self._outlet = None if shared.outlet is None else RingOutlet(shared.outlet, stage)
        self._group = None if tensor is None else SharedGroup(tensor, start.part.tensor, awaiting=peers)

    def meet(self) -> None:
        if self._group is not None:
            self._group.barrier()

    def receive(self, step_id: int) -> None:
        import torch

        if self._inlet is not None:
            self._inlet.receive(step_id, torch.empty(1))

    def send(self, step_id: int) -> None:
        import torch

        if self._outlet is not None:
            self._outlet.send(step_id, torch.zeros(1))


def build(start: RankStart, times: StartupTimes, signs: OwnSigns) -> BuiltRank:
    options = dict(parse_qsl(start.config.model.model.partition("?")[2]))
    is_meant = options.get("rank", "0") == str(start.rank)
    with times.phase("weights"):
        times.count(start.rank + 1, 10)
        if is_meant:
            misbehave(options.get("fault", ""))

    others = Others(start, signs) if "others" in options else None

    def before(plan: StepPlan) -> None:
        names = [row.request_id for row in plan.rows]
        if "pass" in names:
            assert others is not None
            others.receive(plan.step_id)
        for name in names:
            fault, _, rank = name.partition("-")
            if rank in (str(start.rank), "all"):
                misbehave(fault)
        if "meet" in names:
            assert others is not None
            others.meet()
        if "pass" in names and others is not None:
            others.send(plan.step_id)

    other = is_meant and options.get("fault")
    if other == "trace":
        import torch

        vars(torch.profiler)["profile"] = _refuse
    loaded = Loaded(
        "old" if other == "version" else digest(start.config),
        2,
        NUM_BLOCKS - (other == "blocks"),
        BLOCK_SIZE,
        BYTES_PER_BLOCK,
        "float32",
        "float32",
        MAX_MODEL_LEN,
        MAX_MODEL_LEN,
        times.phases(),
    )
    last = WithDevice if "device" in options else LastStage
    worker = last(before) if start.part.is_last else EarlierStage(before)
    return BuiltRank(worker, loaded, lambda: None, (lambda command: None) if start.config.carries else None)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    sys.exit(run_rank(build))
