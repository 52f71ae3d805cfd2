"""When the core's process looks for garbage: between two steps, never inside one.

Reference counts free almost everything at once; the collector is there for cycles. Left to itself it starts in the
middle of whatever allocates, and a full collection costs more than a step. Here it is off, and the loop asks between
steps: while steps overlap, the device is busy with the next one then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GarbageSchedule:
    """Collects by the same counts as Python's own thresholds do, only at moments that the loop picks."""

    new_objects: int = 5_000
    """More containers than that made, and not freed again, since the last collection: collect the youngest."""
    younger_runs: int = 10
    """So many collections of a generation, and the next older one is collected with it."""

    def take_over(self) -> None:
        """Switch the automatic collector off, and keep what is alive now."""
        self.keep()
        gc.disable()

    def keep(self) -> None:
        """What is alive now lives as long as the process, and is never looked at: after much was loaded."""
        gc.collect()
        gc.freeze()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The automatic collector is off within, for a loop of steps in somebody else's process; then as it was."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    def between_steps(self) -> None:
        """Collect if enough was made since the last time; otherwise this costs a fraction of a microsecond."""
        new, young, old = gc.get_count()
        if new > self.new_objects:
            gc.collect(0 if young < self.younger_runs else 1 if old < self.younger_runs else 2)

    def when_idle(self) -> None:
        """Collect everything: nobody waits."""
        gc.collect()
