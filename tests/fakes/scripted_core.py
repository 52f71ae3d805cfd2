"""An engine core without a model, in this process or in one of its own: `python scripted_core.py`.

The model counts: after token t comes t + 1. How it behaves is said in the model's name, e.g. `fake?delay=0.01`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.admission import ModelLimits
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.parking import NOTHING_SUPPLIED, Suppliers
from pagefleet_engine.core.scheduler import Scheduler
from pagefleet_engine.core.step import FailureKind, StepMasks, StepPlan, StepResult, TokenLogprobs
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import Ready
from pagefleet_engine.engine_core.process import CoreStart, run_core
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError
from pagefleet_engine.executor.executor import CacheFacts
from pagefleet_engine.executor.trace import StepTrace
from pagefleet_engine.startup import StartupTimes

VOCAB_SIZE = 300
BLOCK_SIZE = 4
NUM_BLOCKS = 256
MAX_MODEL_LEN = 512


Hook = Callable[[StepPlan], None]


def _nothing(plan: StepPlan) -> None:
    """The default hook."""


@dataclass(slots=True)
class CountedStep:
    """A step of the executor below, computed at the launch; `after` is called at the wait."""

    plan: StepPlan
    outcome: StepResult
    executor: CountingExecutor
    after: Hook
    is_sampled: bool = False

    @property
    def is_computed(self) -> bool:
        return self.executor.is_computed

    def sample(self, masks: StepMasks) -> None:
        assert self.plan.masked
        assert not self.is_sampled, "masked rows are sampled once"
        self.is_sampled = True
        self.executor.events.append(("sample", self.plan.step_id))
        for row, mask in zip(masks.rows, masks.allowed, strict=True):
            assert row in self.plan.masked
            self.executor.sample(self.plan.rows[row].request_id, mask, self.outcome.sampled[row])

    def result(self) -> StepResult:
        self.executor.events.append(("wait", self.plan.step_id))
        assert self.is_sampled or not self.plan.masked
        self.after(self.plan)
        return self.outcome


class CountingExecutor:
    """Samples the last token plus one, under a mask the next that it allows.

    `before` is called with each plan at its launch, `after` when it is waited for. Both may raise. `failing` names
    requests that fail when next in a step.
    """

    def __init__(self, before: Hook = _nothing, after: Hook = _nothing, max_in_flight: int = 1) -> None:
        self.cache = CacheFacts(NUM_BLOCKS, BLOCK_SIZE, 1, group_layers([None]))
        self.max_in_flight = max_in_flight
        self.num_stages = 1
        self.idle_seconds = 0.0
        self.expert_load = None
        self.steps_together = False
        self.trace: StepTrace | None = None
        self.bells: Sequence[int] = ()
        self.is_shut_down = False
        self.failing: dict[str, FailureKind] = {}
        self.events: list[tuple[str, int]] = []
        """("launch", "sample" or "wait", step) in the order of the calls."""
        self.is_computed = True
        self._on_layer: Callable[[], None] = lambda: None
        self._before = before
        self._after = after
        self._rows: dict[str, list[int]] = {}
        self._wants_logprobs: set[str] = set()

    def check(self) -> None:
        """See Executor."""

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int:
        """A step is a layer."""
        self._on_layer = on_layer
        return 1

    def give_up(self, plan: StepPlan) -> None:
        """See Worker."""

    def launch(self, plan: StepPlan) -> CountedStep:
        self.events.append(("launch", plan.step_id))
        for request_id in plan.removed:
            self._rows.pop(request_id, None)
        for new in plan.new:
            self._rows[new.request_id] = list(new.token_ids)
            if new.sampling.logprobs is not None:
                self._wants_logprobs.add(new.request_id)
        self._before(plan)
        sampled, logprobs = [], {}
        for request_id, token_ids in plan.told.items():
            self._rows[request_id] += token_ids
        for index, row in enumerate(plan.rows):
            tokens = self._rows[row.request_id]
            assert len(tokens) >= row.num_computed_tokens + row.num_new_tokens
            assert row.samples == (len(tokens) == row.num_computed_tokens + row.num_new_tokens)
            picked = [(tokens[-1] + 1) % VOCAB_SIZE] if row.samples and index not in plan.masked else []
            tokens += picked
            sampled.append(picked)
            if picked and row.request_id in self._wants_logprobs:
                logprobs[row.request_id] = [TokenLogprobs(picked, [-0.5], 1)]
        failed = {
            row.request_id: self.failing.pop(row.request_id) for row in plan.rows if row.request_id in self.failing
        }
        self._on_layer()
        return CountedStep(plan, StepResult(sampled, logprobs, failed=failed), self, self._after)

    def sample(self, request_id: str, mask: NDArray[np.int32], sampled: Sequence[int]) -> None:
        """Pick a token for a masked row, and put it into `sampled`."""
        assert isinstance(sampled, list)
        tokens = self._rows[request_id]
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        after = allowed[allowed > tokens[-1]]
        sampled.append(int((after if len(after) else allowed)[0]))
        tokens += sampled

    def shutdown(self) -> None:
        self.is_shut_down = True


def scripted_core(
    config: EngineConfig,
    before: Hook = _nothing,
    after: Hook = _nothing,
    max_in_flight: int = 1,
    cache_events: CacheEvents | None = None,
    *,
    suppliers: Suppliers = NOTHING_SUPPLIED,
) -> EngineCore:
    """Return a core over a `CountingExecutor`."""
    limits = ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE)
    kv_cache = KVCache(NUM_BLOCKS, BLOCK_SIZE, events=cache_events)
    scheduler = Scheduler(config.scheduler, kv_cache, limits, suppliers=suppliers)
    return EngineCore(scheduler, CountingExecutor(before, after, max_in_flight), limits, "fake", suppliers.grammars)


def build(start: CoreStart, cache_events: CacheEvents | None, times: StartupTimes) -> tuple[EngineCore, Ready]:
    """Build what the model's name says.

    `load_when`: not before this file exists; `delay`: seconds per step; `broken`: with a load error; `refuses`: a
    setting; `fails`: at each step; `dead`: at the first; `in_flight`: steps that overlap.
    """
    config = start.config
    options = dict(parse_qsl(config.model.model.partition("?")[2]))
    with times.phase("weights"):
        times.count(3, 4)
        while "load_when" in options and not Path(options["load_when"]).exists():
            time.sleep(0.01)
    if "broken" in options:
        raise ModelLoadError(f"the fake model is {options['broken']}")
    if "refuses" in options:
        raise ConfigError(f"the fake model takes no {options['refuses']}")

    def before(plan: StepPlan) -> None:
        time.sleep(float(options.get("delay", 0)))
        if "fails" in options:
            raise RuntimeError("the device is gone")
        if "dead" in options:
            raise EngineDead("rank 1 was killed")

    core = scripted_core(config, before, max_in_flight=int(options.get("in_flight", 1)), cache_events=cache_events)
    return core, Ready(MAX_MODEL_LEN, VOCAB_SIZE, NUM_BLOCKS, BLOCK_SIZE, "float32", {"weights": 0.5})


if __name__ == "__main__":
    sys.exit(run_core(build))
