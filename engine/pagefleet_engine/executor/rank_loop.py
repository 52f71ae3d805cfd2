"""What a rank does: the commands of the executor, in order, on its worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagefleet_engine.core.step import StepMasks, StepPlan
from pagefleet_engine.errors import StepOutOfMemory
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.messages import (
    Computed,
    Launch,
    Loaded,
    Reply,
    StepFailed,
    Take,
    Taken,
    decode_command,
    encode,
)
from pagefleet_engine.executor.ring import RingReader, RingWriter

PATIENCE_S = 9.0
"""That ranks which serve wait for each other within a step. They do the same work at the same time."""

_LOOK_S = 0.0002
"""Between two looks at the device while somebody wants to know when a step is computed."""
_LONGEST = 500
"""Characters of an error's text."""

_log = logging.getLogger(__name__)


class RankWorker(Protocol):
    """What computes in this process."""

    @property
    def idle_seconds(self) -> float: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """A rank that is ready to serve."""

    worker: RankWorker
    loaded: Loaded
    end_loading: Callable[[], None]
    """Ranks that loaded at different speeds may take their time; from now on they may not."""


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    pending: PendingStep | None
    """None: it failed, as was told."""


class RankLoop:
    """Does what it is told, in order."""

    def __init__(
        self,
        rank: int,
        worker: RankWorker,
        commands: RingReader,
        replies: RingWriter,
        count_launch: Callable[[], None],
        count_finish: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._worker = worker
        self._commands = commands
        self._replies = replies
        self._count_launch = count_launch
        self._count_finish = count_finish
        self._steps: deque[_Step] = deque()
        self._to_tell: _Step | None = None
        """A step of which it is to be told when only its masked rows are left."""

    def run(self) -> None:
        """Serve for ever."""
        while True:
            parts = self._commands.receive(None if self._to_tell is None else _LOOK_S)
            self._tell_computed()
            if parts is None:
                continue
            match decode_command(parts):
                case Launch(plan):
                    self._launch(plan)
                case StepMasks() as masks:
                    self._sample(masks)
                case Take():
                    self._take()

    def _launch(self, plan: StepPlan) -> None:
        step = _Step(plan, None)
        try:
            step.pending = self._worker.launch(plan)
        except Exception as error:  # whatever a device may raise; at once, as others may wait for this rank
            self._tell_failure(plan, error)
        self._steps.append(step)
        self._count_launch()
        if plan.masked and self._rank == 0 and step.pending is not None:
            self._to_tell = step
            self._tell_computed()

    def _tell_computed(self) -> None:
        step = self._to_tell
        if step is not None and (step.pending is None or step.pending.is_computed):
            self._to_tell = None
            self._reply(Computed(step.plan.step_id))

    def _sample(self, masks: StepMasks) -> None:
        step = self._steps[-1]
        if step.pending is None:
            return
        try:
            step.pending.sample(masks)
        except Exception as error:  # as at a launch; where rows have no room on one rank, tokens of others are lost too
            step.pending = None
            self._tell_failure(step.plan, error)

    def _take(self) -> None:
        step = self._steps.popleft()
        result = None
        try:
            if step.pending is not None:
                result = step.pending.result()
        except Exception as error:  # as at a launch
            self._tell_failure(step.plan, error)
        finally:
            self._count_finish()
        if result is not None and self._rank == 0:
            self._reply(Taken(step.plan.step_id, result, self._worker.idle_seconds))

    def _tell_failure(self, plan: StepPlan, error: Exception) -> None:
        out_of_memory = isinstance(error, StepOutOfMemory)
        if not out_of_memory:
            _log.error("step %d failed with %d requests", plan.step_id, len(plan.rows), exc_info=error)
        self._reply(StepFailed(plan.step_id, out_of_memory, describe(error)))

    def _reply(self, reply: Reply) -> None:
        self._replies.send(encode(reply), wait_on)


def describe(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"


def wait_on() -> None:
    """An executor that is gone ends this process by itself."""
