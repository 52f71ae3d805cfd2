"""What the stages of a pipeline give each other: each rank its hidden states to that one of the next stage which has
its number among the tensor ranks, once a step and in the order of the steps.

Both sides know from the step's plan how much that is, so that nothing but the step's number is said about it. A step
that failed in one stage still comes to those behind it, as numbers that are none: so every stage receives as often as
the one before it sends.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagefleet_engine.errors import EngineDead

Awaiting = AbstractContextManager[None]
"""What a rank waits for others in, which says that it does."""
NOBODY_LOOKS: Awaiting = nullcontext()


def check_step(expected: int, came: int) -> None:
    """Raises EngineDead where a stage was given another step's hidden states: all that it computes would be wrong."""
    if came != expected:
        raise EngineDead(f"step {expected} was to come from the stage before, not {came}: report this as an error")


class Inlet(Protocol):
    """The end of a channel at which things come out. Used by one thread."""

    def receive(self, step_id: int, into: Tensor) -> None:
        """Wait for what was sent next, of this step and as large as `into`; that is contiguous.

        On a GPU the stream waits in the place of the host, and another step's numbers become NaN.

        Raises:
            EngineDead: another step's came.
            RuntimeError: the other end is gone.
        """
        ...


class Outlet(Protocol):
    """The end at which they go in. Used by one thread."""

    def send(self, step_id: int, x: Tensor) -> None:
        """Send a step's contiguous tensor, which may be written to afterwards; waits only where the channel is full.

        Raises:
            RuntimeError: the other end is gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageLinks:
    """A rank's channels from the stage before and to the next; by default there is neither."""

    inlet: Inlet | None = None
    outlet: Outlet | None = None


class Stage:
    """Takes part in each step once: receives, if it is not the first, and sends, if it is not the last.

    Args:
        links: to its neighbours.
        hidden: [T, D], room for the hidden states of the largest step; with it there are several stages.

    Attributes:
        is_first: whether tokens enter here.
        is_last: whether they are sampled here.
    """

    def __init__(self, links: StageLinks | None = None, hidden: Tensor | None = None) -> None:
        links = links or StageLinks()
        self._inlet, self._outlet = links.inlet, links.outlet
        self.hidden = hidden
        self.is_first, self.is_last = links.inlet is None, links.outlet is None
        self._step_id = -1
        self._has_received = self._has_sent = True

    def begin(self, step_id: int) -> None:
        """Begin a step."""
        self._step_id = step_id
        self._has_received, self._has_sent = self.is_first, self.is_last

    def receive(self, num_tokens: int, num_padded: int) -> None:
        """Wait for what the stage before gave, and put it into `hidden`, with zeros behind it up to `num_padded`."""
        assert self._inlet is not None, "nothing comes to the first stage"
        hidden = self._room(num_padded)
        hidden[num_tokens:].zero_()
        self._inlet.receive(self._step_id, hidden[:num_tokens])
        self._has_received = True

    def send(self, hidden: Tensor) -> None:
        """Give the next stage, if there is one, what was computed."""
        if self._outlet is not None:
            self._outlet.send(self._step_id, hidden)
            self._has_sent = True

    def give_up(self, num_tokens: int) -> None:
        """Do what is left of a step that failed here."""
        if not self._has_received:
            self.receive(num_tokens, num_tokens)
        if not self._has_sent:
            self.send(self._room(num_tokens).fill_(math.nan))

    def _room(self, num_tokens: int) -> Tensor:
        assert self.hidden is not None, "a stage among others has room for what they give"
        return self.hidden[:num_tokens]
