"""When data ranks step that must step together: a model's layers exchange something among them, as experts do.

All take part in each step while any has work; one that has none computes a step without tokens. A wave begins for all
when one calls for it; every sixteenth step of it they agree whether any has work left, and where none has, it ends for
all after the same step. A call for the next wave needs no agreement: whoever calls has seen the last one end, so the
others have, or will at the same step.
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
        compute_nothing: computes a step without tokens.

    Attributes:
        running: whether a wave is on.
        num_empty: steps without tokens, in all.
    """

    def __init__(self, calls: Calls, any_has_work: Callable[[bool], bool], compute_nothing: Callable[[], None]) -> None:
        self.running = False
        self.num_empty = 0
        self._calls = calls
        self._any_has_work = any_has_work
        self._compute_nothing = compute_nothing
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

    def begin(self) -> None:
        """This rank has a step to compute: where no wave is on, one begins for all."""
        if not self.running:
            self._calls.call(self._num_ended + 1)
            self._start()

    def step_empty(self) -> None:
        """Take part in a step that is due, without tokens."""
        if not self.running:
            self._start()
        self._compute_nothing()
        self.num_empty += 1

    def stepped(self, has_work: bool) -> None:
        """Count a step, after which this rank has work or none."""
        self._steps += 1
        if self._steps % AGREE_EVERY == 0 and not self._any_has_work(has_work):
            self.running = False
            self._num_ended += 1

    def _start(self) -> None:
        self.running, self._steps = True, 0
