"""An engine core without a model, in this process or in one of its own: `python scripted_core.py`.

The model counts: after token t comes t + 1. How it behaves is said in the model's name, e.g. `fake?delay=0.01`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from urllib.parse import parse_qsl

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.engine_core.process import run_core
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.executor.executor import CacheFacts, FinishedStep

VOCAB_SIZE = 300
BLOCK_SIZE = 4
NUM_BLOCKS = 256
MAX_MODEL_LEN = 512


class CountingExecutor:
    """Samples the last token plus one. `before` is called with each plan and may raise."""

    def __init__(self, before: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.cache = CacheFacts(NUM_BLOCKS, BLOCK_SIZE, 1, group_layers([None]))
        self.max_in_flight = 1
        self.idle_seconds = 0.0
        self.is_shut_down = False
        self._before = before
        self._rows: dict[str, list[int]] = {}
        self._wants_logprobs: set[str] = set()

    def launch(self, plan: StepPlan) -> FinishedStep:
        for request_id in plan.removed:
            self._rows.pop(request_id, None)
        for new in plan.new:
            self._rows[new.request_id] = list(new.token_ids)
            if new.sampling.logprobs is not None:
                self._wants_logprobs.add(new.request_id)
        self._before(plan)
        sampled, logprobs = [], {}
        for row in plan.rows:
            tokens = self._rows[row.request_id]
            picked = [(tokens[-1] + 1) % VOCAB_SIZE] if row.samples else []
            tokens += picked
            sampled.append(picked)
            if picked and row.request_id in self._wants_logprobs:
                logprobs[row.request_id] = [TokenLogprobs(picked, [-0.5], 1)]
        return FinishedStep(StepResult(sampled, logprobs=logprobs))

    def shutdown(self) -> None:
        self.is_shut_down = True


def scripted_core(config: EngineConfig, before: Callable[[StepPlan], None] = lambda plan: None) -> EngineCore:
    """Return a core over a `CountingExecutor`."""
    limits = ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE)
    scheduler = Scheduler(config.scheduler, KVCache(NUM_BLOCKS, BLOCK_SIZE), limits)
    return EngineCore(scheduler, CountingExecutor(before), limits, "fake")


def build(config: EngineConfig) -> tuple[EngineCore, Ready]:
    """Build what the model's name says: `delay` seconds per step, `broken` with a load error, `fails` at each step."""
    options = dict(parse_qsl(config.model.model.partition("?")[2]))
    if "broken" in options:
        raise ModelLoadError(f"the fake model is {options['broken']}")

    def before(plan: StepPlan) -> None:
        time.sleep(float(options.get("delay", 0)))
        if "fails" in options:
            raise RuntimeError("the device is gone")

    return scripted_core(config, before), Ready(MAX_MODEL_LEN, VOCAB_SIZE, NUM_BLOCKS, BLOCK_SIZE, "float32")


if __name__ == "__main__":
    sys.exit(run_core(build))
