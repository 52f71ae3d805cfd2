"""What a rank does: the commands of the executor, in order, on its worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from pagefleet_engine.core.step import ExpertLoad, StepMasks, StepPlan
from pagefleet_engine.errors import EngineDead, ProfileRefused, StepOutOfMemory
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.messages import (
    Carry,
    Computed,
    Launch,
    Loaded,
    Reply,
    StartTrace,
    StepFailed,
    StopTrace,
    Take,
    Taken,
    Traced,
    decode_command,
    encode,
)
from pagefleet_engine.executor.pace import DevicePace, Pace
from pagefleet_engine.executor.ring import RingReader, RingWriter
from pagefleet_engine.executor.trace import ThreadTrace
from pagefleet_engine.executor.vital_signs import Awaited, OwnSigns
from pagefleet_engine.ranks.parallelism import RankPart

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

    @property
    def expert_load(self) -> ExpertLoad | None: ...

    @property
    def steps_together(self) -> bool: ...

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int: ...

    def give_up(self, plan: StepPlan) -> None: ...


class Launching(Protocol):
    """A transfer that is launched among the steps."""

    @property
    def is_over(self) -> bool:
        """Whether its kernel is on the device, or will never be."""
        ...

    def wait(self) -> None:
        """Return once it is over."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """A rank that is ready to serve."""

    worker: RankWorker
    loaded: Loaded
    end_loading: Callable[[], None]
    """Ranks that loaded at different speeds may take their time; from now on they may not."""
    carry: Callable[[Carry], Launching | None] | None = None
    """Launches this rank's transfers; None: ranks launch none among their steps."""


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    pending: PendingStep | None
    """None: it failed, as was told."""
    is_sampled: bool = True
    """Whether no masked rows are still to be sampled."""

    @property
    def is_done(self) -> bool:
        """Whether to take it waits for nothing."""
        return self.pending is None or (self.is_sampled and self.pending.is_computed)


class RankLoop:
    """Does what it is told, in order."""

    def __init__(
        self,
        part: RankPart,
        built: BuiltRank,
        commands: RingReader,
        replies: RingWriter,
        signs: OwnSigns,
        trace: ThreadTrace,
    ) -> None:
        self._samples, self._tells = part.is_last, part.tells
        self._has_stages = part.num_stages > 1
        self._carry = built.carry
        self._takes_unasked = self._has_stages or self._carry is not None
        self._worker = worker = built.worker
        self._commands = commands
        self._replies = replies
        self._signs = signs
        self._trace = trace
        pace = Pace(signs, worker.tell_of_layers)
        self._pace = pace if pace.num_layers else None
        # Where steps are taken at a command, who gives it may be late, and the ranks of the stage wait for each other.
        # Where copies of the model step together, what a step takes hangs on the prompts of others.
        is_paced = self._pace is None and self._takes_unasked and not worker.steps_together
        self._device_pace = DevicePace(signs) if is_paced else None
        self._idle = signs.awaiting(Awaited.EXECUTOR)
        self._steps: deque[_Step] = deque()
        self._newest: _Step | None = None
        self._launching: list[Launching] = []
        """Transfers, before the next step. Beside each other: of two whose other ends are gone each would else hold the
        step for as long as a rank may hold one."""
        self._to_tell: _Step | None = None
        """A step of which it is to be told when only its masked rows are left."""

    def run(self) -> None:
        """Serve for ever."""
        while True:
            with self._idle:
                parts = self._commands.receive(_LOOK_S if self._is_looking else None)
            self._tell_computed()
            self._take_unasked()
            if parts is None:
                continue
            match decode_command(parts):
                case Launch(plan):
                    self._wait_for_transfers()
                    self._launch(plan)
                case StepMasks() as masks:
                    self._wait_for_transfers()
                    self._sample(masks)
                case Take():
                    self._take()
                case Carry() as command:
                    self._begin_transfer(command)
                case StartTrace():
                    self._tell_traced(self._trace.start)
                case StopTrace(stem):
                    self._tell_traced(partial(self._trace.stop, Path(stem)) if stem else self._trace.discard)
            self._take_unasked()

    @property
    def _is_looking(self) -> bool:
        """Whether there is something to tell as soon as the device is done."""
        return self._to_tell is not None or (self._takes_unasked and bool(self._steps) and self._steps[0].is_sampled)

    def _begin_transfer(self, command: Carry) -> None:
        assert self._carry is not None
        begun = self._carry(command)
        self._launching = [one for one in (*self._launching, begun) if one is not None and not one.is_over]

    def _wait_for_transfers(self) -> None:
        """What is launched next comes behind the transfers before it."""
        for one in self._launching:
            one.wait()
        self._launching.clear()

    def _launch(self, plan: StepPlan) -> None:
        step = _Step(plan, None)
        if self._pace is not None:
            self._pace.begin(plan.num_tokens)
        try:
            step.pending = self._worker.launch(plan)
            step.is_sampled = not (plan.masked and self._samples)
        except EngineDead:  # as this process does, and with it all others
            raise
        except Exception as error:  # whatever a device may raise; at once, as others may wait for this rank
            self._tell_failure(plan, error)
            if self._has_stages:
                self._worker.give_up(plan)
        self._steps.append(step)
        self._newest = step
        self._signs.launch()
        self._tell_of_device()
        if plan.masked and self._tells and step.pending is not None:
            self._to_tell = step
            self._tell_computed()

    def _tell_computed(self) -> None:
        step = self._to_tell
        if step is not None and (step.pending is None or step.pending.is_computed):
            self._to_tell = None
            self._reply(Computed(step.plan.step_id))

    def _sample(self, masks: StepMasks) -> None:
        step = self._newest
        assert step is not None, "rows of a step are sampled"
        step.is_sampled = True
        if step.pending is None:
            return
        try:
            step.pending.sample(masks)
            self._tell_of_device()
        except Exception as error:  # as at a launch; where rows have no room on one rank, tokens of others are lost too
            step.pending = None
            self._tell_failure(step.plan, error)

    def _take_unasked(self) -> None:
        while self._takes_unasked and self._steps and self._steps[0].is_done:
            self._take()

    def _take(self) -> None:
        step = self._steps.popleft()
        result = None
        try:
            if step.pending is not None:
                result = step.pending.result()
        except Exception as error:  # as at a launch
            self._tell_failure(step.plan, error)
        finally:
            if self._device_pace is not None:
                self._device_pace.end()
            self._signs.finish()
            self._tell_of_device()
        if result is not None and self._tells:
            self._reply(Taken(step.plan.step_id, result, self._worker.idle_seconds, self._worker.expert_load))

    def _tell_of_device(self) -> None:
        """Say how long the device may take for the oldest step, once it waits for nothing of the host."""
        if self._device_pace is None or not self._steps:
            return
        step = self._steps[0]
        if step.is_sampled and step.pending is not None:
            self._device_pace.begin(step.plan.num_tokens)

    def _tell_traced(self, do: Callable[[], object]) -> None:
        try:
            with self._idle:  # it is no step, and disks may be slow
                do()
        except ProfileRefused as error:
            self._reply(Traced(str(error)))
        else:
            self._reply(Traced())

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
