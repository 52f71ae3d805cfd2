"""The steps that were launched and not taken yet, oldest first, and what becomes of one that fails.

A step that ran out of memory ends its own requests and says nothing about the worker; where that was while its masked
rows were sampled, only theirs. Any other exception ends them too, and casts doubt on the worker: if the next step to be
launched fails as well, the core gives up. A step that was launched before the failure was known may hold the very
request that caused it, so it proves nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from traceback import clear_frames

from pagefleet_engine.core.step import FailureKind, StepMasks, StepPlan, StepResult
from pagefleet_engine.engine_core.wire import FAILURE_ANSWERS
from pagefleet_engine.errors import EngineDead, StepOutOfMemory
from pagefleet_engine.executor.executor import Executor, PendingStep

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that failed on its way to the device; implements `PendingStep`."""

    error: Exception
    is_computed: bool = True

    def sample(self, masks: StepMasks) -> None:
        """Nothing is there to be sampled."""

    def result(self) -> StepResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    pending: PendingStep
    in_doubt: bool
    """Whether the worker was in doubt at the launch."""
    is_sampled: bool
    """Whether it has no masked rows that are still to be sampled."""


class StepQueue:
    """At most `executor.max_in_flight` steps.

    Args:
        executor: of the steps.
        fails_alone: whether a step that fails keeps nobody waiting but its own requests; else it is the engine's end.

    Attributes:
        num_out_of_memory: steps that ran out of memory, in all.
    """

    def __init__(self, executor: Executor, *, fails_alone: bool = True) -> None:
        self._fails_alone = fails_alone
        self.num_out_of_memory = 0
        self._executor = executor
        self._due = 0 if executor.num_stages == 1 else -1
        """Which step's masked rows are sampled next: the oldest, whose tokens before are known once it is that; of a
        pipeline the newest, as nothing of it is on its way elsewhere."""
        self._steps: deque[_Launched] = deque()
        self._in_doubt = False

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def takes_another(self) -> bool:
        """True while one more may be launched: not before a failed one was taken, nor the last one's rows sampled."""
        steps = self._steps
        if len(steps) >= self._executor.max_in_flight:
            return False
        return not steps or (steps[-1].is_sampled and not isinstance(steps[-1].pending, _Failed))

    def launch(self, plan: StepPlan) -> None:
        """Start a step; a failure shows when it is taken, so that results keep their order.

        Raises:
            EngineDead: it failed, and others wait for it.
        """
        pending: PendingStep
        try:
            pending = self._executor.launch(plan)
        except Exception as error:  # whatever a device may raise, the other requests must go on
            self._check_alone(error)
            pending = _Failed(error)
        self._steps.append(_Launched(plan, pending, self._in_doubt, not plan.masked))

    @property
    def knows_all(self) -> bool:
        """Whether all tokens before the step that is launched next are known."""
        return self._due == -1 or not self._steps

    @property
    def due(self) -> StepPlan:
        """The plan of the step whose masked rows are sampled next; there must be one."""
        return self._steps[self._due].plan

    @property
    def is_computed(self) -> bool:
        """Whether the device has nothing to do for the step that is due but to sample its masked rows."""
        return self._steps[self._due].pending.is_computed

    @property
    def is_sampled(self) -> bool:
        """Whether the step that is due has no masked rows that are still to be sampled."""
        return self._steps[self._due].is_sampled

    def sample(self, masks: StepMasks) -> bool:
        """Sample the masked rows of the step that is due; False where the device has no room, and they give nothing.

        Another failure shows when the step is taken.
        """
        step = replace(self._steps[self._due], is_sampled=True)
        has_room = True
        try:
            step.pending.sample(masks)
        except StepOutOfMemory as error:  # the other rows are sampled already
            has_room = False
            self._note_out_of_memory(step.plan, len(masks.rows), error)
        except Exception as error:  # as at a launch
            step = replace(step, pending=_Failed(error))
        self._steps[self._due] = step
        return has_room

    def take(self) -> tuple[StepPlan, StepResult]:
        """Wait for the oldest step; one that failed has all its requests in `failed`.

        Raises:
            EngineDead: the worker is broken.
        """
        step = self._steps.popleft()
        try:
            result = step.pending.result()
        except StepOutOfMemory as error:
            self._check_alone(error)
            self._note_out_of_memory(step.plan, len(step.plan.rows), error)
            return step.plan, _all_failed(step.plan, FailureKind.OUT_OF_MEMORY)
        except EngineDead:
            raise
        except Exception as error:  # as above
            self._check_alone(error)
            _log.exception("step %d failed with %d requests", step.plan.step_id, len(step.plan.rows))
            clear_frames(error.__traceback__)  # they hold the step's tensors, and the error, which holds them
            if self._in_doubt and step.in_doubt:
                raise EngineDead(f"two steps in a row failed, the last with {type(error).__name__}") from error
            self._in_doubt = True
            return step.plan, _all_failed(step.plan, FailureKind.STEP_FAILED)
        self._in_doubt = False
        return step.plan, result

    def _check_alone(self, error: Exception) -> None:
        """Raises EngineDead where others wait for the step that failed."""
        if not self._fails_alone and not isinstance(error, EngineDead):
            raise EngineDead(f"a step failed that others compute too: {type(error).__name__}: {error}") from error

    def _note_out_of_memory(self, plan: StepPlan, num_requests: int, error: StepOutOfMemory) -> None:
        self.num_out_of_memory += 1
        answer = FAILURE_ANSWERS[FailureKind.OUT_OF_MEMORY]
        _log.error("step %d with %d requests: %s (%s)", plan.step_id, num_requests, answer.message, error)


def _all_failed(plan: StepPlan, kind: FailureKind) -> StepResult:
    return StepResult(sampled=[()] * len(plan.rows), failed=dict.fromkeys(plan.rows.request_ids, kind))
