"""When copies of a model step that must step together: its layers exchange something among them, as experts do.

All take part in each step while any has work; one that has none computes a step without tokens. A wave begins for all
when one calls for it; every sixteenth step of it they agree whether any has work left, and where none has, it ends for
all after the same step. A call for the next wave needs no agreement: whoever calls has seen the last one end, so the
others have, or will at the same step.

Steps are counted as they are launched. Those on their way still end: the oldest that has not ended is one that every
copy has launched, or will, as none of its own is before it.

Where large steps are computed in halves (`core/dual_batch.py`), ranks agree on that before each step: all would divide
it, or none does; one without tokens would not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

AGREE_EVERY = 16
"""Steps. Ranks that have run dry compute so many in vain; to agree takes some ten microseconds."""


class Calls(Protocol):
    """How ranks call for a wave."""

    @property
    def bell(self) -> int:
        """A descriptor that is readable when somebody has called."""
        ...

    def call(self, wave: int) -> None:
        """Have all ranks begin a wave."""
        ...

    def newest(self) -> int:
        """Return the latest wave that any rank has called for; 0: none yet."""
        ...


class Waves:
    """One rank's side.

    Args:
        calls: to and from the other ranks.
        any_has_work: agrees with all ranks whether any has work, given whether this one has.
        all_divide: agrees with all ranks whether each would divide its next step, given whether this one would; None:
            no step is divided.

    Attributes:
        running: whether a wave is on.
    """

    def __init__(
        self, calls: Calls, any_has_work: Callable[[bool], bool], all_divide: Callable[[bool], bool] | None = None
    ) -> None:
        self.running = False
        self._calls = calls
        self._any_has_work = any_has_work
        self._all_divide = all_divide
        self._num_ended = 0
        self._steps = 0
        """Of the wave that runs."""

    @property
    def bell(self) -> int:
        """A descriptor that is readable when another rank begins a wave."""
        return self._calls.bell

    @property
    def is_due(self) -> bool:
        """Whether this rank has to step, also where it has no work."""
        return self.running or self._calls.newest() > self._num_ended

    def begin(self, divides: bool = False) -> bool:
        """This rank launches a step, and would divide it or not: where no wave is on, one begins for all. Returns
        whether all divide it."""
        if not self.running:
            if not self.is_due:
                self._calls.call(self._num_ended + 1)
            self.running, self._steps = True, 0
        return self._all_divide is not None and self._all_divide(divides)

    def stepped(self, has_work: bool) -> None:
        """Count a step that was launched, after which this rank has work or none."""
        self._steps += 1
        if self._steps % AGREE_EVERY == 0 and not self._any_has_work(has_work):
            self.running = False
            self._num_ended += 1
