"""Runs step plans somewhere; the engine core does not know where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagefleet_engine.core.kv_groups import KVGroups
from pagefleet_engine.core.step import ExpertLoad, StepMasks, StepPlan, StepResult
from pagefleet_engine.executor.trace import StepTrace


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the worker found out about its KV cache."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    kv_groups: KVGroups


class PendingStep(Protocol):
    """A step on its way."""

    @property
    def is_computed(self) -> bool:
        """Whether the device has nothing to do for it but to sample its masked rows."""
        ...

    def sample(self, masks: StepMasks) -> None:
        """Sample the masked rows; called once where the plan has any, before the next launch.

        Raises:
            StepOutOfMemory: the device had no room for it.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step; called once.

        Raises:
            StepOutOfMemory: the device had no room for this step; the executor can run others.
        """
        ...


class Executor(Protocol):
    """One model on one set of devices. Called from one thread only."""

    @property
    def cache(self) -> CacheFacts:
        """The KV pool that was allocated."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before the first of them is waited for."""
        ...

    @property
    def num_stages(self) -> int:
        """Parts of the model that steps pass through; with several, nothing samples before all before it is known."""
        ...

    @property
    def idle_seconds(self) -> float:
        """How long the device had nothing to do between two steps that followed each other, in all."""
        ...

    @property
    def expert_load(self) -> ExpertLoad | None:
        """What ranks were wanted that have experts; None where nobody counts it, or not here."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a forward pass and sample the rows that need no mask; plans run in the order of their launches.

        Raises:
            StepOutOfMemory: the device has no room for this step; others can still run.
        """
        ...

    @property
    def trace(self) -> StepTrace | None:
        """Records its steps; None: they are what the thread does that calls it."""
        ...

    @property
    def bells(self) -> Sequence[int]:
        """File descriptors that are readable while there is something for `check`."""
        ...

    def check(self) -> None:
        """Look whether the devices are still there, without waiting.

        Raises:
            EngineDead: they are not, as any other call may, too.
        """
        ...

    def shutdown(self) -> None:
        """Free the device."""
        ...
