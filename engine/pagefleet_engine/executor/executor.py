"""Runs step plans somewhere: in this process, or later on many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagefleet_engine.core.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the worker found out about its KV cache."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


class Executor(Protocol):
    """One model on one set of devices."""

    @property
    def cache(self) -> CacheFacts:
        """The KV pool that was allocated."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and sample. Called from one thread only."""
        ...

    def shutdown(self) -> None:
        """Free the device."""
        ...
