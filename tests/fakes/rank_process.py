"""A rank's process without a model: `python rank_process.py`. After token t comes t + 1.

How loading goes is said in the model's name, e.g. `fake?fault=config&rank=1`. A request named `die-1` has rank 1
do that in each of its steps; `-all` has all do it. `late-0` has the first stage of several fail once its step is out,
at SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pagefleet_engine.core.step import StepMasks, StepPlan, StepResult
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError, StepOutOfMemory
from pagefleet_engine.executor.messages import Loaded, RankStart, digest
from pagefleet_engine.executor.rank_loop import BuiltRank
from pagefleet_engine.executor.rank_process import run_rank
from pagefleet_engine.startup import StartupTimes

from tests.fakes.scripted_core import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, CountingExecutor


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
        case "config":
            raise ConfigError("one thing is wrong: do another")
        case "model":
            raise ModelLoadError("/m is damaged: download it again")
        case "memory":
            raise MemoryError
        case "oom":
            raise StepOutOfMemory("no room")
        case "raise":
            raise ValueError("a bad step")
        case "astray":
            raise EngineDead("a step came that was not to come")


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


class EarlierStage(CountingExecutor):
    """Of a pipeline; it is done with a step whether or not its masks have come."""

    def launch(self, plan: StepPlan) -> PassedOn:  # type: ignore[override]
        super().launch(plan)
        return PassedOn(plan)


def build(start: RankStart, times: StartupTimes) -> BuiltRank:
    options = dict(parse_qsl(start.config.model.model.partition("?")[2]))
    is_meant = options.get("rank", "0") == str(start.rank)
    with times.phase("weights"):
        times.count(start.rank + 1, 10)
        if is_meant:
            misbehave(options.get("fault", ""))

    def before(plan: StepPlan) -> None:
        for row in plan.rows:
            fault, _, rank = row.request_id.partition("-")
            if rank in (str(start.rank), "all"):
                misbehave(fault)

    other = is_meant and options.get("fault")
    if other == "trace":
        vars(torch.profiler)["profile"] = _refuse
    loaded = Loaded(
        "old" if other == "version" else digest(start.config),
        2,
        NUM_BLOCKS - (other == "blocks"),
        BLOCK_SIZE,
        1,
        "float32",
        "float32",
        MAX_MODEL_LEN,
        MAX_MODEL_LEN,
        times.phases(),
    )
    worker = CountingExecutor(before) if start.part.is_last else EarlierStage(before)
    return BuiltRank(worker, loaded, lambda: None)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    sys.exit(run_rank(build))
