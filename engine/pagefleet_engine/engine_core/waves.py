"""When copies of a model step that must step together: its layers exchange something among them, as experts do.

All take part in each step while any has work; one that has none computes a step without tokens. A wave begins for all
when one calls for it; every sixteenth step of it they agree whether any has work left, and where none has, it ends for
all after the same step. A call for the next wave needs no agreement: whoever calls has seen the last one end, so the
others have, or will at the same step.

Steps are counted as they are launched. Those on their way still end: the oldest that has not ended is one that every
copy has launched, or will, as none of its own is before it.

Before each step ranks agree on what none of them can decide alone, where there is such a thing (`CommonStep`): large
steps are computed in halves, which all would divide, or none does; a graph has fixed sizes, so all run that of the rank
with the most tokens, or all run without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pagefleet_engine.core.step import CommonStep

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
        join: agrees with all ranks on the next step, given this one's; None: there is nothing to agree on.

    Attributes:
        running: whether a wave is on.
    """

    def __init__(
        self,
        calls: Calls,
        any_has_work: Callable[[bool], bool],
        join: Callable[[CommonStep], CommonStep] | None = None,
    ) -> None:
        self.running = False
        self._calls = calls
        self._any_has_work = any_has_work
        self._join = join
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

    def begin(self, own: CommonStep) -> CommonStep | None:
        """This rank launches a step: where no wave is on, one begins for all. Returns what it is for all of them."""
        if not self.running:
            if not self.is_due:
                self._calls.call(self._num_ended + 1)
            self.running, self._steps = True, 0
        return None if self._join is None else self._join(own)

    def stepped(self, has_work: bool) -> None:
        """Count a step that was launched, after which this rank has work or none."""
        self._steps += 1
        if self._steps % AGREE_EVERY == 0 and not self._any_has_work(has_work):
            self.running = False
            self._num_ended += 1
